#pragma once
// What `snug compare` and the benchmarks measure with: times as ratios of programs that take turns, bytes as counted by
// the allocator, comparisons to the bit, and numbers as text.

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace snug::measure {

/// Waits until the device has done the work given to the device. Does nothing for the CPU.
void wait_for(c10::Device device);

/// Seconds until the device has done the work.
double seconds_of(c10::Device device, const std::function<void()>& work);

/// On the CPU seconds of the processor, which depend less on other programs; on other devices as seconds_of, because
/// such a device computes beside the processor.
double busy_seconds_of(c10::Device device, const std::function<void()>& work);

/// The spread of several runs.
struct Spread {
  double median = 0, low = 0, high = 0;
};
Spread spread_of(const std::vector<double>& values);

class Turns {
 public:
  Turns() = default;
  /// `times[i]`: seconds of program i, round by round.
  explicit Turns(std::vector<std::vector<double>> times) : times_(std::move(times)) {}

  Spread seconds(size_t program) const;

  /// The spread of a program's time divided by another program's time in the same round.
  Spread ratio(size_t program, size_t to = 0) const;

 private:
  std::vector<std::vector<double>> times_;
};

/// Runs all programs once to warm up, then in `rounds` rounds, every second round backwards. A program returns the
/// program's seconds.
Turns take_turns(const std::vector<std::function<double()>>& programs, int64_t rounds);

/// "1.46 (1.31 to 1.52)"
std::string str(const Spread& spread);

/// Forward and backward, with the gradients dropped before; on the device of the parameters.
struct StepBytes {
  int64_t peak = 0;         ///< above the level before the step
  int64_t activations = 0;  ///< the same, less the bytes of all gradients
};
StepBytes bytes_of_step(const std::vector<at::Tensor>& parameters, const std::function<void()>& step);

void drop_gradients(const std::vector<at::Tensor>& parameters);
int64_t bytes_of(const std::vector<at::Tensor>& tensors);

/// Copies; undefined for a parameter without a gradient.
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters);

/// Whether shapes, dtypes and bits are equal, pair by pair. Undefined tensors equal undefined tensors.
bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b);

/// Whether `work` stays within `bytes` of live tensor memory on the device.
bool fits(c10::Device device, int64_t bytes, const std::function<void()>& work);

/// The largest value in [1, most] for which `works` is true, if `works` is true for all smaller values; 0: for no
/// value. The search begins at `expected`, and tries about 2 log2(|result - expected|) values.
int64_t largest(int64_t most, const std::function<bool(int64_t)>& works, int64_t expected = 1);

/// "2 threads on AMD EPYC, LibTorch 2.13.0, 2026-11-21, device cpu"
std::string machine(c10::Device device);

/// "1.5 MiB" for a number of bytes, "12.3 %" for a share.
std::string bytes_text(int64_t bytes);
std::string percent(double share);

}  // namespace snug::measure
