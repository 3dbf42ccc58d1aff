#pragma once
// Random numbers on the simulated accelerator: a generator of the CPU that says it is of the device. The host knows its
// state without waiting, as with CUDA's.

#include <optional>

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace snug::sim_device {

at::Generator make_generator(c10::DeviceIndex index);
const at::Generator& default_generator(c10::DeviceIndex index);

/// The random numbers of one call of an operator. Kernels of the CPU take only generators of the CPU, so they get
/// a copy.
class Draw {
 public:
  /// Does nothing for operators that are not random. `device` has the generator of those that are given none.
  Draw(const c10::OperatorHandle& op, const torch::jit::Stack& stack, c10::Device device);

  /// Runs the kernel on the arguments on the stack. It draws the same numbers each time.
  void run(const c10::OperatorHandle& kernel, torch::jit::Stack& stack);

  /// After a run, on the host, when the operator is called: the device's generator goes on.
  void finish();

 private:
  std::optional<size_t> argument_;  // of the operator that is a generator
  at::Generator device_, before_, after_;
};

}  // namespace snug::sim_device
