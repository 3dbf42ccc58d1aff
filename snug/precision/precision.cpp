#include "snug/precision/precision.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <string>

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>

#include "snug/core/error.h"
#include "snug/precision/detail/matmul_speed.h"

namespace snug {
namespace {

constexpr std::array kNames{
    std::pair{Precision::Float32, std::string_view("float32")},
    std::pair{Precision::BFloat16, std::string_view("bfloat16")},
    std::pair{Precision::Float16, std::string_view("float16")},
    std::pair{Precision::Auto, std::string_view("auto")},
};

// Reading one element waits for the device.
double seconds_of_product(const at::Tensor& a) {
  const auto start = std::chrono::steady_clock::now();
  at::mm(a, a)[0][0].item<float>();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

at::Tensor filled(c10::Device device, c10::ScalarType dtype, int64_t size) {
  return at::full({size, size}, 0.5, at::TensorOptions().device(device).dtype(dtype));
}

// The best of a few: other programs only ever make a run slower.
double best_seconds(const at::Tensor& a, int repeats) {
  constexpr double kEnough = 0.015;  // where a type is emulated, one product says it
  double best = std::numeric_limits<double>::infinity();
  double spent = 0;
  for (int i = 0; i < repeats && spent < kEnough; ++i) {
    const double seconds = seconds_of_product(a);
    best = std::min(best, seconds);
    spent += seconds;
  }
  return best;
}

}  // namespace

double detail::matmul_speed(c10::Device device, c10::ScalarType dtype, int64_t size, int repeats) {
  try {
    const auto speed = [&](int64_t n, int times) {
      return 2e-9 * std::pow(static_cast<double>(n), 3) / best_seconds(filled(device, dtype, n), times);
    };
    seconds_of_product(filled(device, dtype, 8));  // libraries and threads start
    // Where a CPU emulates a type, a small product says so in milliseconds, a large one in seconds.
    constexpr int64_t kSmall = 64;
    constexpr double kSlow = 1;  // billions a second: a tenth of a second for the large product
    if (device.is_cpu() && size > kSmall) {
      if (const double small = speed(kSmall, 3); small < kSlow) {
        return small;
      }
    }
    return speed(size, repeats);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error&) {
    if (dtype == at::kFloat) {
      throw;
    }
    return 0;
  }
}

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
      .float32 = detail::matmul_speed(device, at::kFloat, large, 6),
      .bfloat16 = detail::matmul_speed(device, at::kBFloat16, large, 6),
      .float16 = detail::matmul_speed(device, at::kHalf, small, 3),
      .float32_small = detail::matmul_speed(device, at::kFloat, small, 3),
  };
}

Precision choose_precision(const MatmulSpeed& speed, c10::DeviceType device) {
  constexpr double kWorthTheCasts = 1.2;
  const auto pays = [](double low, double full) { return low > 0 && low >= kWorthTheCasts * full; };
  if (pays(speed.bfloat16, speed.float32)) {
    return Precision::BFloat16;
  }
  const bool has_float16 = device != c10::DeviceType::CPU;
  return has_float16 && pays(speed.float16, speed.float32_small) ? Precision::Float16 : Precision::Float32;
}

Precision measured_precision(c10::Device device) {
  static std::mutex mutex;
  static std::map<std::string, Precision> known;
  const std::lock_guard lock(mutex);
  const std::string name = device.str();
  if (const auto found = known.find(name); found != known.end()) {
    return found->second;
  }
  return known[name] = choose_precision(measure_matmul_speed(device), device.type());
}

MatmulAccumulation matmul_accumulation() {
  constexpr auto kAllowed = at::CuBLASReductionOption::AllowReducedPrecisionWithSplitK;
  const at::Context& context = at::globalContext();
  return {
      .fp16_reduction = context.allowFP16ReductionCuBLAS() == kAllowed,
      .bf16_reduction = context.allowBF16ReductionCuBLAS() == kAllowed,
      .fp16_accumulation = context.allowFP16AccumulationCuBLAS(),
      .tf32 = context.allowTF32CuBLAS(),
  };
}

void accumulate_matmuls_in_fp32(bool allow_tf32) {
  at::Context& context = at::globalContext();
  context.setAllowFP16ReductionCuBLAS(false);
  context.setAllowBF16ReductionCuBLAS(false);
  context.setAllowFP16AccumulationCuBLAS(false);
  context.setAllowFP16ReductionCPU(false);
  context.setAllowTF32CuBLAS(allow_tf32);
  context.setAllowTF32CuDNN(allow_tf32);
}

}  // namespace snug
