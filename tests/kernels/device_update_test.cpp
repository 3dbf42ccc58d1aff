// The kernels of a GPU, run by the CPU, against the CPU's own kernels.

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>

#include "src/kernels/master_adamw.h"
#include "src/kernels/update_table.h"
#include "tests/kernels/one_lane_update.h"
#include "tests/support/simd_targets.h"

namespace snug::kernels::device_update_test {
namespace {

/// The instruction sets that fuse a product and a sum, as a GPU does.
std::vector<std::string> fusing_targets() {
  std::vector<std::string> targets = detail::simd_targets();
  std::erase_if(targets, [](const std::string& target) { return !target.starts_with("AVX"); });
  return targets;
}

class DeviceUpdate : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { detail::use_simd_target(GetParam()); }
  void TearDown() override { detail::use_simd_target(""); }
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DeviceUpdate);
INSTANTIATE_TEST_SUITE_P(, DeviceUpdate, ::testing::ValuesIn(fusing_targets()),
                         [](const auto& target) { return target.param; });

AdamWStep step_with(double beta1, double t) {
  return {.lr = 0.01,
          .beta1 = beta1,
          .beta2 = 0.99,
          .eps = 1e-8,
          .weight_decay = 0.1,
          .bias_correction1 = 1 - std::pow(beta1, t),
          .bias_correction2 = 1 - std::pow(0.99, t),
          .inverse_scale = 0.125f};
}

/// One tensor's numbers, as FP32 or as the bits of 16.
struct State {
  std::vector<float> master, m, v;
  std::vector<uint16_t> p, g;

  void add(float weight, float exp_avg, float exp_avg_sq, uint16_t parameter, uint16_t gradient) {
    master.push_back(weight), m.push_back(exp_avg), v.push_back(exp_avg_sq);
    p.push_back(parameter), g.push_back(gradient);
  }
};

/// All combinations of the values at the ends of FP32 and of 16 bits, then numbers of usual sizes, then any bits.
State all_kinds_of_numbers() {
  using Limits = std::numeric_limits<float>;
  State state;
  const float special[] = {0.0f,
                           -0.0f,
                           Limits::denorm_min(),
                           -Limits::denorm_min(),
                           Limits::min(),
                           1e-20f,
                           1.0f,
                           -3.0f,
                           Limits::max(),
                           -Limits::max(),
                           Limits::infinity(),
                           -Limits::infinity(),
                           Limits::quiet_NaN()};
  const uint16_t halves[] = {0,      0x8000, 1,      0x83FF, 0x3C00, 0x3F80, 0x7BFF,
                             0x7C00, 0x7F7F, 0x7F80, 0xFF80, 0x7E00, 0x7FC0};
  for (const float weight : special) {
    for (const float m : special) {
      for (const float v : special) {
        for (const uint16_t half : halves) {
          state.add(weight, m, v, half, halves[state.m.size() % std::size(halves)]);
          state.add(weight, m, v, halves[state.m.size() % std::size(halves)], half);
        }
      }
    }
  }
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto bits16 = [&] { return static_cast<uint16_t>(random()); };
  for (int i = 0; i < 50'000; ++i) {
    const auto near_one = static_cast<uint16_t>(0x3000 + random() % 0x1000);
    state.add(normal(random), normal(random) * 1e-2f, std::pow(normal(random) * 1e-2f, 2.0f), near_one, near_one);
    state.add(std::bit_cast<float>(static_cast<uint32_t>(random())),
              std::bit_cast<float>(static_cast<uint32_t>(random())),
              std::bit_cast<float>(static_cast<uint32_t>(random())), bits16(), bits16());
  }
  return state;
}

/// The bits, or the same bits for every NaN: those of a NaN may differ.
std::vector<uint32_t> bits_of(const std::vector<float>& values) {
  std::vector<uint32_t> bits;
  std::ranges::transform(values, std::back_inserter(bits),
                         [](float value) { return std::isnan(value) ? 0xFFFFFFFFu : std::bit_cast<uint32_t>(value); });
  return bits;
}
std::vector<uint16_t> bits_of(std::vector<uint16_t> halves, uint16_t infinity) {
  std::ranges::replace_if(halves, [&](uint16_t half) { return (half & 0x7FFF) > infinity; }, uint16_t{0xFFFF});
  return halves;
}

void expect_same(const State& a, const State& b, uint16_t infinity) {
  EXPECT_EQ(bits_of(a.master), bits_of(b.master));
  EXPECT_EQ(bits_of(a.m), bits_of(b.m));
  EXPECT_EQ(bits_of(a.v), bits_of(b.v));
  EXPECT_EQ(bits_of(a.p, infinity), bits_of(b.p, infinity));
}

constexpr float kScale = 8, kCount = 7;
constexpr uint64_t kFirst = (uint64_t{1} << 32) - 5000;  // the upper half of elements' numbers changes in the tensor

UpdatedTensor tensor_of(State& state, bool has_masters) {
  return {.parameter = state.p.data(),
          .gradient = state.g.data(),
          .exp_avg = state.m.data(),
          .exp_avg_sq = state.v.data(),
          .master = has_masters ? state.master.data() : nullptr,
          .step = &kCount,
          .count = static_cast<int64_t>(state.m.size()),
          .first_element = kFirst};
}

State by_device(UpdateKind kind, const AdamWStep& step, State state) {
  UpdateTable table(kind, step);
  table.grad_scale = &kScale;
  table.add(tensor_of(state, kind != UpdateKind::kStochastic));
  update_by_one_lane(table);
  return state;
}

/// The same with FP32 parameters, the masters, and FP32 gradients of the same values.
State by_device_in_fp32(const AdamWStep& step, State state) {
  std::vector<float> gradients;
  std::ranges::transform(state.g, std::back_inserter(gradients),
                         [](uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); });
  UpdatedTensor tensor = tensor_of(state, false);
  tensor.parameter = state.master.data();
  tensor.gradient = gradients.data();
  UpdateTable table(UpdateKind::kFloat32, step);
  table.grad_scale = &kScale;
  table.add(tensor);
  update_by_one_lane(table);
  return state;
}

template <class Half>
State by_host(const AdamWStep& step, State state, bool has_masters) {
  auto* parameter = reinterpret_cast<Half*>(state.p.data());
  const auto* gradient = reinterpret_cast<const Half*>(state.g.data());
  const auto count = static_cast<int64_t>(state.m.size());
  if (has_masters) {
    master_adamw_update(step, state.master.data(), parameter, gradient, state.m.data(), state.v.data(), count);
  } else if constexpr (std::is_same_v<Half, BFloat16>) {
    stochastic_adamw_update(step, {.step = 7, .offset = kFirst}, parameter, gradient, state.m.data(), state.v.data(),
                            count);
  }
  return state;
}

TEST_P(DeviceUpdate, HasTheBitsOfTheCpuForAllKindsOfNumbers) {
  const State state = all_kinds_of_numbers();
  for (const double beta1 : {0.9, 0.3}) {
    const AdamWStep step = step_with(beta1, kCount);
    expect_same(by_device(UpdateKind::kFloat16Masters, step, state), by_host<Float16>(step, state, true), 0x7C00);
    expect_same(by_device(UpdateKind::kBFloat16Masters, step, state), by_host<BFloat16>(step, state, true), 0x7F80);
    State in_fp32 = by_device_in_fp32(step, state);
    const State with_masters = by_host<BFloat16>(step, state, true);
    in_fp32.p = with_masters.p;
    expect_same(in_fp32, with_masters, 0x7F80);
    expect_same(by_device(UpdateKind::kStochastic, step, state), by_host<BFloat16>(step, state, false), 0x7F80);
  }
}

TEST_P(DeviceUpdate, ChunksAreTheElementsOfAllTensors) {
  const AdamWStep step = step_with(0.9, kCount);
  UpdateTable table(UpdateKind::kBFloat16Masters, step);
  table.grad_scale = &kScale;
  std::vector<State> states;
  for (const size_t count :
       {size_t{1}, size_t{UpdateTable::kChunk}, size_t{UpdateTable::kChunk + 1}, size_t{0}, size_t{5}}) {
    State state;
    for (size_t i = 0; i < count; ++i) {
      state.add(1, static_cast<float>(i % 11), 1, 0, static_cast<uint16_t>(0x3F00 + i % 64));
    }
    states.push_back(state);
  }
  std::vector<State> updated = states;
  for (State& state : updated) {
    table.add(tensor_of(state, true));
  }
  EXPECT_EQ(table.chunks(), 5u);
  update_by_one_lane(table);
  for (size_t i = 0; i < states.size(); ++i) {
    expect_same(updated[i], by_host<BFloat16>(step, states[i], true), 0x7F80);
  }
}

TEST(DeviceUpdateTable, NothingIsUpdatedAfterAnOverflow) {
  const State before = all_kinds_of_numbers();
  State state = before;
  UpdateTable table(UpdateKind::kStochastic, step_with(0.9, kCount));
  for (const float found : {1.0f, 0.0f}) {
    table.found_inf = &found;
    table.size = 0;
    table.add(tensor_of(state, false));
    update_by_one_lane(table);
    EXPECT_EQ(bits_of(state.m) == bits_of(before.m), found == 1);
  }
}

TEST(DeviceUpdateTable, BiasCorrectionsAreThoseOfTheHost) {
  const auto constants = [](double power1, double power2) {
    const AdamWConstants c({.lr = 3e-4, .bias_correction1 = 1 - power1, .bias_correction2 = 1 - power2});
    return std::vector{c.negative_step_size, c.root_bias_correction2};
  };
  const std::pair<double, double> pairs[] = {{0.9, 0.999}, {0.9, 0.99},   {0.95, 0.95},
                                             {0.8, 0.98},  {0.0, 0.9999}, {0.5, 0.995}};
  for (const auto& [beta1, beta2] : pairs) {
    int differences = 0;
    for (uint32_t t = 1; t <= 100'000; ++t) {
      differences += constants(power_by_one_lane(beta1, t), power_by_one_lane(beta2, t)) !=
                             constants(std::pow(beta1, t), std::pow(beta2, t))
                         ? 1
                         : 0;
    }
    EXPECT_EQ(differences, 0) << beta1 << ", " << beta2;
  }
}

}  // namespace
}  // namespace snug::kernels::device_update_test
