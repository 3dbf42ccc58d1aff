#pragma once
// The generator that a random operator draws from. If a policy asks for it, the operator draws from a copy of the
// program's generator, and the program's generator then takes the state of that copy. The state that the operator drew
// from is therefore known exactly, whatever other threads draw meanwhile. The operator can also repeat its draws
// without the program's generator, which other threads use.

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>

namespace snug::detail {

/// The generators of one operator call. Policies fill it in before the call and read it after the call.
struct RandomDraw {
  /// If defined, the operator draws from this state, instead of the generator that the program gave it or, if it gave
  /// none, the default generator of its device. The call changes neither `from` nor the program's generators.
  at::Generator from = {};
  /// Set it to get `before`.
  bool is_noted = false;
  /// The generator that the operator drew from, in its state before the call. Copy it; do not draw from it. Undefined
  /// where there is no generator, as on a meta device.
  at::Generator before = {};

  using Kernel = c10::function_ref<void(const c10::OperatorHandle&)>;
  /// Runs a random operator: calls `kernel` with the arguments on the stack and either the operator itself or its twin
  /// that takes a generator.
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack, Kernel kernel);
};

/// A copy of the generator that the operator draws from by itself. Undefined where there is no generator.
at::Generator copy_of_programs_generator(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

/// Whether an operator repeats its results from the same operands and RandomDraw::from. True for LibTorch's operators
/// and for those that take a generator. Other operators may draw from elsewhere.
bool draws_the_same_again(const c10::OperatorHandle& op);

}  // namespace snug::detail
