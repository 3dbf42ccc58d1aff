#pragma once
// How an operator runs on the simulated accelerator: the CPU's kernel, on CPU tensors over the device's memory.

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace snug::sim_device {

/// A CPU tensor over the same memory, which it does not own.
at::Tensor cpu_view_of(const at::Tensor& tensor);

/// Runs `op` with the arguments on the stack as a task of the current stream, by the CPU's kernel of `kernel`, which
/// has the same arguments but for names.
void run_on_device(const c10::OperatorHandle& kernel, torch::jit::Stack& stack);

/// The host waits for the device's current stream. Counted in host_reads().
void read_by_host(c10::Device device);

}  // namespace snug::sim_device
