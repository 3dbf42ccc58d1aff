#include "src/precision/matmul_speed.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "snug/state.h"

namespace snug::detail {
namespace {

constexpr double kLimit = 0.1;      // seconds for all measurements
constexpr double kPerSize = 0.015;  // seconds for one type and size; one product shows an emulated type

double billions(int64_t size) { return 2e-9 * std::pow(static_cast<double>(size), 3); }

class SpeedMeter {
 public:
  SpeedMeter(const MatmulProbe& probe, c10::DeviceType device)
      : probe_(probe), is_cpu_(device == c10::DeviceType::CPU) {}

  /// Billions of floating-point operations a second.
  double speed(c10::ScalarType dtype, int64_t size, int repeats) {
    try {
      // If a CPU emulates a type, a small product shows the emulation in milliseconds, a large product in seconds.
      constexpr int64_t kSmall = 64;
      if (is_cpu_ && size > kSmall) {
        const double small = billions(kSmall) / best_seconds(dtype, kSmall, 3);
        if (billions(size) > kPerSize * small) {
          return small;
        }
      }
      return billions(size) / best_seconds(dtype, size, repeats);
    } catch (const c10::Error& error) {
      if (dtype == at::kFloat || is_out_of_memory(error)) {
        throw;
      }
      return 0;
    }
  }

 private:
  // The best of a few measurements, because other programs only ever make a run slower. Infinite if no time is left.
  double best_seconds(c10::ScalarType dtype, int64_t size, int repeats) {
    double best = std::numeric_limits<double>::infinity();
    if (spent_ > kLimit - 2 * kPerSize) {
      return best;
    }
    probe_.multiply(dtype, size);
    double here = 0;
    for (int i = 0; i < repeats && here < kPerSize && spent_ <= kLimit - kPerSize; ++i) {
      const double start = probe_.now();
      probe_.multiply(dtype, size);
      const double seconds = probe_.now() - start;
      best = std::min(best, seconds);
      here += seconds;
      // The untimed product before counts, too, without the start of libraries.
      spent_ += i == 0 ? 2 * seconds : seconds;
    }
    return best;
  }

  const MatmulProbe& probe_;
  bool is_cpu_;
  double spent_ = 0;
};

}  // namespace

MatmulProbe probe_of(c10::Device device) {
  const auto multiply = [device, a = at::Tensor()](c10::ScalarType dtype, int64_t size) mutable {
    if (!a.defined() || a.scalar_type() != dtype || a.size(0) != size) {
      a = at::full({size, size}, 0.5, at::TensorOptions().device(device).dtype(dtype));
    }
    at::mm(a, a)[0][0].item<float>();  // reading one element waits for the device
  };
  const auto now = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  };
  return {multiply, now};
}

MatmulSpeed measure(const MatmulProbe& probe, c10::DeviceType device) {
  const bool is_cpu = device == c10::DeviceType::CPU;
  const int64_t large = is_cpu ? 384 : 2048;
  const int64_t small = is_cpu ? 64 : 2048;
  SpeedMeter meter(probe, device);
  return {
      .float32 = meter.speed(at::kFloat, large, 6),
      .bfloat16 = meter.speed(at::kBFloat16, large, 6),
      .float16 = meter.speed(at::kHalf, small, 3),
      .float32_small = meter.speed(at::kFloat, small, 3),
  };
}

MatmulSpeed measure_matmul_speed(c10::Device device) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // FP32 products must stay FP32
  return measure(probe_of(device), device.type());
}

Precision precision_for(const MatmulSpeed& speed, c10::DeviceType device) {
  constexpr double kWorthTheCasts = 1.2;
  const auto pays = [](double low, double full) { return low > 0 && low >= kWorthTheCasts * full; };
  if (pays(speed.bfloat16, speed.float32)) {
    return Precision::BFloat16;
  }
  const bool has_float16 = device != c10::DeviceType::CPU;
  return has_float16 && pays(speed.float16, speed.float32_small) ? Precision::Float16 : Precision::Float32;
}

}  // namespace snug::detail
