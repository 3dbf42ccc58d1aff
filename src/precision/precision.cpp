#include "snug/precision.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <string>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "src/precision/matmul_speed.h"

namespace snug {
namespace {

constexpr std::array kNames{
    std::pair{Precision::Float32, std::string_view("float32")},
    std::pair{Precision::BFloat16, std::string_view("bfloat16")},
    std::pair{Precision::Float16, std::string_view("float16")},
    std::pair{Precision::Auto, std::string_view("auto")},
};

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
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // FP32 products must stay FP32
  return detail::measure(detail::probe_of(device), device.type());
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
