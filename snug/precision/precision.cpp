#include "snug/precision/precision.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <string>

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>

#include "snug/core/error.h"

namespace snug {
namespace {

constexpr std::array kNames{
    std::pair{Precision::Float32, std::string_view("float32")},
    std::pair{Precision::BFloat16, std::string_view("bfloat16")},
    std::pair{Precision::Float16, std::string_view("float16")},
    std::pair{Precision::Auto, std::string_view("auto")},
};

// Reading one element waits for the device.
double seconds_of_product(const at::Tensor& a, const at::Tensor& b) {
  const auto start = std::chrono::steady_clock::now();
  at::mm(a, b)[0][0].item<float>();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// The best of a few: other programs only ever make a run slower.
double gigaflops(c10::Device device, c10::ScalarType dtype, int64_t size, int repeats) {
  const auto options = at::TensorOptions().device(device).dtype(dtype);
  const at::Tensor a = at::full({size, size}, 0.5, options);
  const at::Tensor b = at::full({size, size}, 0.25, options);
  seconds_of_product(a, b);  // warm-up
  double best = seconds_of_product(a, b);
  for (int i = 1; i < repeats; ++i) {
    best = std::min(best, seconds_of_product(a, b));
  }
  const double n = static_cast<double>(size);
  return 2e-9 * n * n * n / best;
}

}  // namespace

std::string_view to_string(Precision precision) {
  return std::find_if(kNames.begin(), kNames.end(), [&](auto& entry) { return entry.first == precision; })->second;
}

Precision precision_from_string(std::string_view name) {
  for (const auto& [precision, known] : kNames) {
    if (known == name) {
      return precision;
    }
  }
  throw ConfigError(fmt::format("precision: '{}' is unknown; give float32, bfloat16, float16 or auto", name));
}

c10::ScalarType compute_dtype(Precision precision) {
  switch (precision) {
    case Precision::Float32:
      return c10::ScalarType::Float;
    case Precision::BFloat16:
      return c10::ScalarType::BFloat16;
    case Precision::Float16:
      return c10::ScalarType::Half;
    case Precision::Auto:
      break;
  }
  throw ConfigError("compute_dtype: Precision::Auto has no dtype yet; resolve it with choose_precision");
}

MatmulSpeed measure_matmul_speed(c10::Device device) {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // FP32 products are to stay so
  const int64_t large = device.is_cpu() ? 384 : 2048;
  const int64_t small = device.is_cpu() ? 64 : 2048;
  return {
      .float32 = gigaflops(device, at::kFloat, large, 5),
      .bfloat16 = gigaflops(device, at::kBFloat16, large, 5),
      .float16 = gigaflops(device, at::kHalf, small, 3),
      .float32_small = gigaflops(device, at::kFloat, small, 3),
  };
}

Precision choose_precision(const MatmulSpeed& speed) {
  constexpr double kWorthTheCasts = 1.2;
  return speed.bfloat16 >= kWorthTheCasts * speed.float32 ? Precision::BFloat16 : Precision::Float32;
}

}  // namespace snug
