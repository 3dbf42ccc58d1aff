#pragma once
// MemoryMeter: the bytes of live tensors, their peak, and the kinds of tensors at the peak. Exact to the byte on the
// CPU; backward and all threads are included.
//
//   snug::MemoryMeter meter;
//   meter.attach(*model);
//   meter.attach(optimizer);
//   train_one_step();
//   std::cout << meter.report().activations << " bytes of activations at the peak\n";
//
// MemoryLimit: a hard cap on live tensor memory while the guard lives, on any machine. Use a limit to stay within a
// promised amount, or to find out on a large machine whether a small machine is enough.
//
//   {
//     snug::MemoryLimit limit(torch::kCPU, snug::Bytes::parse("1GiB"));
//     train();   // an allocation past 1 GiB throws c10::OutOfMemoryError, with live memory unchanged
//   }
//
// SavedTensorHooks: decides how autograd keeps the tensors that backward will need, while the guard lives, on the
// guard's thread. The C++ twin of Python's torch.autograd.graph.saved_tensors_hooks, and the basis of checkpointing and
// offload.
//
//   snug::SavedTensorHooks in_bf16(
//       [](const Tensor& t) {   // indices and narrow tensors stay unchanged
//         return std::any(std::pair(t.dtype() == torch::kFloat ? t.to(torch::kBFloat16) : t.detach(),
//                                   t.scalar_type()));
//       },
//       [](std::any& kept) {
//         const auto& [tensor, dtype] = std::any_cast<std::pair<Tensor, torch::ScalarType>&>(kept);
//         return tensor.to(dtype);
//       });
//   auto loss = model->forward(x).sum();    // saved tensors went through the first function
//   loss.backward();                        // and come back through the second
//
// TensorsInFile: builds a model whose weights do not fit into memory.
//
//   std::optional<snug::TensorsInFile> in_file(std::in_place, "run");
//   auto model = MyModel();          // the weights are in a file in "run"
//   in_file.reset();
//   snug::AdamW optimizer(model->parameters());
//   snug::Stepper stepper(model, optimizer, {.budget = {.memory = snug::Bytes::parse("1GiB"), .offload = "run"}});
//
// move_with_weights_on_host: moves a model to a device that has no room for the weights.
//
//   auto model = MyModel();
//   snug::move_with_weights_on_host(*model, torch::kCUDA);
//   snug::AdamW optimizer(model->parameters());
//   snug::Stepper stepper(model, optimizer, {.budget = {.memory = snug::Bytes::parse("20GiB"), .offload = ""}});

#include <any>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "snug/core.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace snug {

/// Counts from the meter's construction on. Not copyable; several meters may live at once. A device without an index
/// means the current device at the construction. Pinned host memory is not counted.
/// On a device other than the CPU, make and destroy the meter on the thread that trains. On the training thread, a
/// living meter takes the place of torch's own profiler (c10::DebugInfoKind::PROFILER_STATE), which records nothing
/// then. No profile of torch's may begin or end while the meter lives.
/// report() assigns each tensor to a category by the tensor's role at the time of the call, so call report() before
/// gradients are dropped.
/// While a meter lives, a custom Function that asks for saved tensors gets copies of the saved tensors that something
/// else refers to as well. So the Function may return the tensors as gradients.
class MemoryMeter {
 public:
  /// Bytes of tensor memory on the meter's device. The categories describe the peak, and add up:
  /// parameters + gradients + optimizer_state + activations + workspace + outputs + before == level at the start +
  /// peak_bytes.
  /// Gradients that are not in `gradients`:
  /// - A gradient that backward made after the peak is in no category.
  /// - A gradient that was dropped since the peak is workspace.
  struct Report {
    int64_t live_bytes = 0;       ///< alive now, above the level when the meter was made
    int64_t peak_bytes = 0;       ///< most bytes alive at once, above the level when the meter was made
    int64_t parameters = 0;       ///< parameters and buffers of attached modules
    int64_t gradients = 0;        ///< in attached parameters' grad() when report() is called
    int64_t optimizer_state = 0;  ///< state of attached optimizers
    int64_t activations = 0;      ///< saved for backward by autograd
    int64_t workspace = 0;        ///< anything else that was allocated under the meter and is gone again
    int64_t outputs = 0;          ///< anything else that was allocated under the meter and is still alive
    int64_t before = 0;           ///< memory that was alive before the meter and is not attached
  };

  /// Throws ConfigError if live bytes cannot be counted (see live_bytes).
  MemoryMeter();
  explicit MemoryMeter(c10::Device device);
  ~MemoryMeter();
  MemoryMeter(const MemoryMeter&) = delete;
  MemoryMeter& operator=(const MemoryMeter&) = delete;

  /// Assigns the tensors of `module`, and the gradients of these tensors, to categories.
  void attach(const torch::nn::Module& module);
  /// Assigns the tensors of the optimizer's state to optimizer_state. The optimizer must outlive the meter's last
  /// report().
  void attach(const torch::optim::Optimizer& optimizer);

  /// Bytes now and at most, and the categories at the peak, since the meter was made.
  Report report() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

namespace detail {
class OperatorSeam;
}

/// Caps all live tensor memory on `device`, including memory that was alive before.
/// - CPU: the count is exact to the byte.
/// - CUDA: the cap is the caching allocator's memory fraction, so cached blocks count too. Cached blocks that are in
///   the way of the limit are given back to the driver first.
/// - Other devices, and CUDA in a build without SNUG_CUDA=ON: the device's allocator has no cap, so operators are
///   checked. An operator throws if more memory is alive after the operator than before the operator, and more than the
///   limit. So memory may rise above the limit by the bytes that a single operator takes. Checked are operators of the
///   limit's thread and of backward passes that begin on the limit's thread.
///
/// Of several limits the smallest holds.
/// Once a limit has been set, a backward pass that fails, for want of memory or otherwise, leaves nothing alive.
/// LibTorch by itself keeps the gradients that were on the way to other nodes until the thread's next pass.
/// Not counted: memory outside tensors (code, libraries, the program's own memory), and pinned host memory, which the
/// device's runtime allocates.
class [[nodiscard]] MemoryLimit final {
 public:
  /// Throws:
  /// - ConfigError, if more than `bytes` is taken already (the message has both numbers). is_out_of_memory() is true of
  ///   the exception;
  /// - ConfigError, if the device cannot be used, or if another library has replaced snug's allocator of CPU memory.
  MemoryLimit(c10::Device device, Bytes bytes);
  /// If operators are checked, the limit must end on the thread that made the limit.
  ~MemoryLimit();
  MemoryLimit(const MemoryLimit&) = delete;
  MemoryLimit& operator=(const MemoryLimit&) = delete;

  /// The smallest MemoryLimit that can be set now: live bytes, and on CUDA also the gaps between tensors that CUDA's
  /// allocator cannot give back. The call gives back all gaps that the allocator can give back.
  static Bytes smallest(c10::Device device);

 private:
  c10::Device device_;
  int64_t bytes_;
  std::unique_ptr<detail::OperatorSeam> seam_;  // null if the allocator keeps the limit
};

/// Bytes of tensor memory alive on `device` now: on the CPU as requested by tensors, elsewhere as counted by the
/// device's allocator. A device without an index means the current device. Pinned host memory is not counted.
Bytes live_bytes(c10::Device device);

namespace detail {
class AllocationsInFile;
class PolicyScope;
}  // namespace detail

/// While the hooks live, every tensor that autograd saves on the hooks' thread is handed to `pack`, and autograd keeps
/// the result of `pack` instead. `unpack` returns the tensor (same sizes, dtype and device) each time backward needs
/// the tensor.
/// - Only the innermost hooks are asked. Parameters, views and outputs arrive too.
/// - `pack` runs without gradient mode and must not write to its argument. Keep `t.detach()`, never `t` itself, which
///   may be the output of the node that saves `t`.
/// - `unpack` may return the same tensor to several callers. A custom Function gets a copy if something else uses the
///   tensor's memory, so the Function may return the copy as a gradient.
/// - As without hooks, a write in place to a tensor after the save is an error in backward.
/// - Backward passes that begin while the hooks live stay on the hooks' thread, also on a GPU.
/// - If another library, such as Python's torch, has installed an autograd engine, the other engine goes on working.
///   Python's hooks are inside snug's hooks if Python's hooks began later. An engine that is installed while hooks live
///   hides the hooks until the next hooks begin.
class [[nodiscard]] SavedTensorHooks final {
 public:
  SavedTensorHooks(std::function<std::any(const at::Tensor&)> pack, std::function<at::Tensor(std::any&)> unpack);
  ~SavedTensorHooks();
  SavedTensorHooks(const SavedTensorHooks&) = delete;
  SavedTensorHooks& operator=(const SavedTensorHooks&) = delete;

 private:
  std::unique_ptr<detail::PolicyScope> scope_;
};

/// While the scope lives, each CPU tensor of 64 KiB and more that the scope's thread makes lies in a file of its own,
/// which has no name. The system reads the file's pages when the pages are accessed, and writes the pages back when the
/// system needs the memory. A program uses a tensor in a file as any other tensor. A tensor in a file is not live
/// tensor memory: no MemoryLimit counts the tensor. The tensor stays in the file, unless a Stepper with `offload` plans
/// the model into memory. Several scopes end in the reverse of the order in which the scopes began.
///
/// Making a tensor in a file throws Error if the directory has no room. If the disk fails later, an access ends the
/// process. After fork() both processes write to the same tensors.
class [[nodiscard]] TensorsInFile final {
 public:
  /// `directory`: a directory on a disk; a directory that is memory itself (tmpfs) gains nothing. Throws ConfigError if
  /// `directory` is empty.
  explicit TensorsInFile(std::filesystem::path directory);
  ~TensorsInFile();
  TensorsInFile(const TensorsInFile&) = delete;
  TensorsInFile& operator=(const TensorsInFile&) = delete;

 private:
  std::unique_ptr<detail::AllocationsInFile> allocations_;
};

/// Moves a model from the CPU to `device`, for a Stepper with `offload`. Parameters of 64 KiB and more take no memory
/// of the device: their values go to page-locked memory of the host, and an access outside of a Stepper's steps throws.
/// For a device of one's own (PrivateUse1) autograd must not have used the parameters yet. Throws Error if the host has
/// too little memory, ConfigError if `device` is the CPU, and as an allocation of the device does; then some parameters
/// have moved.
void move_with_weights_on_host(torch::nn::Module& model, c10::Device device);

}  // namespace snug
