#pragma once
// What the threads of a device do with an UpdateTable. The formulas are the CPU's, for vectors of one element.

#define SNUG_ONE_LANE

#include <cstdint>
#include <type_traits>

#include "src/kernels/host_device.h"
#include "src/kernels/master_adamw_simd.h"
#include "src/kernels/update_table.h"

namespace snug::kernels::HWY_NAMESPACE {

/// base^exponent for a base from 0 to 1, nearly always rounded correctly: calculated with twice the digits of FP64. A
/// device's own pow() may have other bits than the CPU's.
SNUG_HOST_DEVICE double power(double base, uint32_t exponent) {
  struct Number {
    double high, low;
  };
  const auto product = [](Number a, Number b) {
    const double high = hn::Mul(a.high, b.high);
    const double low = hn::MulAdd(a.low, b.high, hn::MulAdd(a.high, b.low, hn::MulAdd(a.high, b.high, -high)));
    const double sum = high + low;
    return Number{sum, low - (sum - high)};
  };
  Number result{1, 0};
  for (Number square{base, 0}; exponent > 0; exponent /= 2, square = product(square, square)) {
    if (exponent % 2 == 1) {
      result = product(result, square);
    }
  }
  return result.high;
}

SNUG_HOST_DEVICE bool is_skipped(const UpdateTable& table) {
  return table.found_inf != nullptr && *table.found_inf != 0;
}

/// The elements begin to end - 1 of a tensor.
struct Chunk {
  const UpdatedTensor* tensor;
  int64_t begin, end;
};

SNUG_HOST_DEVICE Chunk chunk_of(const UpdateTable& table, uint32_t number) {
  int i = 0;
  while (number >= table.chunk_end[i]) {
    ++i;
  }
  const UpdatedTensor& tensor = table.tensors[i];
  const int64_t begin = (number - (i == 0 ? 0 : table.chunk_end[i - 1])) * UpdateTable::kChunk;
  const int64_t rest = tensor.count - begin;
  return {&tensor, begin, begin + (rest < UpdateTable::kChunk ? rest : UpdateTable::kChunk)};
}

SNUG_HOST_DEVICE AdamWConstants constants_for(const UpdateTable& table, const UpdatedTensor& tensor) {
  AdamWConstants constants = table.constants;
  if (table.grad_scale != nullptr) {
    constants.inverse_scale = hn::Div(1.0f, *table.grad_scale);
  }
  const auto count = static_cast<uint32_t>(*tensor.step);
  constants.correct(table.step.lr, 1 - power(table.step.beta1, count), 1 - power(table.step.beta2, count));
  return constants;
}

template <UpdateKind kKind>
SNUG_HOST_DEVICE void update_element(const UpdateTable& table, const UpdatedTensor& t, const AdamWConstants& constants,
                                     int64_t i) {
  [[maybe_unused]] const auto masters = [&](auto* parameter) {
    const auto* gradient = static_cast<decltype(parameter)>(t.gradient);
    master_vector(constants, t.master + i, parameter + i, gradient + i, t.exp_avg + i, t.exp_avg_sq + i);
  };
  if constexpr (kKind == UpdateKind::kFloat32) {
    const hn::ScalableTag<float> d;
    float* gradient = static_cast<float*>(t.gradient) + i;
    adamw(d, constants, *gradient, static_cast<float*>(t.parameter)[i], t.exp_avg[i], t.exp_avg_sq[i]);
    if (table.grad_scale != nullptr) {
      *gradient = hn::Mul(*gradient, constants.inverse_scale);
    }
  } else if constexpr (kKind == UpdateKind::kFloat16Masters) {
    masters(static_cast<Float16*>(t.parameter));
  } else if constexpr (kKind == UpdateKind::kBFloat16Masters) {
    masters(static_cast<BFloat16*>(t.parameter));
  } else {
    const uint64_t index = t.first_element + static_cast<uint64_t>(i);
    const detail::RandomKeys keys({.step = static_cast<uint64_t>(*t.step)}, index >> 32);
    stochastic_vector(constants, keys, static_cast<uint32_t>(index), static_cast<BFloat16*>(t.parameter) + i,
                      static_cast<const BFloat16*>(t.gradient) + i, t.exp_avg + i, t.exp_avg_sq + i);
  }
}

/// Calls `f` with the kind as a constant.
template <class F>
auto with_kind(UpdateKind kind, const F& f) {
  using Kind = UpdateKind;
  switch (kind) {
    case Kind::kFloat32:
      return f(std::integral_constant<Kind, Kind::kFloat32>());
    case Kind::kFloat16Masters:
      return f(std::integral_constant<Kind, Kind::kFloat16Masters>());
    case Kind::kBFloat16Masters:
      return f(std::integral_constant<Kind, Kind::kBFloat16Masters>());
    default:
      return f(std::integral_constant<Kind, Kind::kStochastic>());
  }
}

}  // namespace snug::kernels::HWY_NAMESPACE
