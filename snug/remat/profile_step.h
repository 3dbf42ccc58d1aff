#pragma once
// profile_step: a forward and backward pass of any model as a list of operators and storages, from which plans are
// made.

#include <functional>

#include <ATen/core/Tensor.h>

#include "snug/core/bytes.h"
#include "snug/planner/profile.h"

namespace snug {

struct ProfileOptions {
  /// That plain training may take above the level at the call. If it takes more, or more than a MemoryLimit in force
  /// allows, the profile is taken while nearly everything that is saved is dropped and rebuilt, which is slower. It is
  /// the same.
  Bytes memory = Bytes::unlimited();
  /// Over which plans made from the profile may offload; see measure_offload_link. As it is, they do not.
  OffloadLink link = {};
};

/// Runs forward and backward passes and writes down their operators, the least of their times, and every byte that they
/// take. `forward_and_loss` returns the loss: a scalar that requires a gradient. It is called up to three times. Where
/// plain training does not fit, it is also called once without a backward pass, and once for each way that did not fit:
/// plainly, and under at most 4 frugal plans, on a CPU 24.
/// After each call, also if it throws, these are as they were before:
/// - gradients that a backward pass has added to, also one inside the forward pass or in a hook;
/// - memory that was there before and that operators of the forward pass have written, on this thread, with its size:
///   that of parameters, buffers and any other tensors;
/// - the default generators.
/// These are not:
/// - other state that the callable keeps;
/// - memory that it gives a tensor by set_data;
/// - what hooks write in the backward pass to anything but gradients;
/// - gradients of a backward() that the program itself calls in Python.
/// Times and bytes are those of the device that the loss is on: of a CPU, or of an accelerator's current stream and its
/// allocator, which rounds. Backward runs on this thread. On a CPU no other thread may allocate tensors meanwhile,
/// which would be counted too.
/// Memory: what plain training takes, at most `options.memory`, or little more than the least that a plan can reach,
/// offloading included where there is a link; and copies of gradients that are there already, of what the forward pass
/// writes to memory that was there before, unless it is zero, and of generators.
/// Throws ConfigError where the profile cannot be taken, as with StepInBackward, which would update parameters, or
/// where only the first forward pass initialises a parameter, from its batch or as lazy modules do (call it once
/// before); c10::OutOfMemoryError where not even the most frugal way fits into a MemoryLimit; and what the callable
/// throws.
StepProfile profile_step(const std::function<at::Tensor()>& forward_and_loss, ProfileOptions options = {});

}  // namespace snug
