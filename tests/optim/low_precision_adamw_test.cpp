#include "src/optim/low_precision_adamw.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/grad_scaler.h"
#include "tests/kernels/conversions.h"
#include "tests/support/optimizers.h"
#include "tests/support/tensors.h"

// AdamW for 16-bit parameters: with masters it is the FP32 AdamW, rounded; with stochastic rounding it is so on
// average.

namespace snug::low_precision_adamw_test {
namespace {

using testing::clones_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::random_parameters;
using testing::same_bits;
using testing::set_gradients;
using testing::tensors_in;
using torch::Tensor;

class Masters : public ::testing::TestWithParam<torch::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Types, Masters, ::testing::Values(torch::kBFloat16, torch::kHalf),
                         [](const auto& param_info) { return c10::toString(param_info.param); });

TEST_P(Masters, AreThoseOfTheFp32OptimizerRounded) {
  const auto low = random_parameters(GetParam());
  std::vector<Tensor> full;
  for (const Tensor& p : low) {
    full.push_back(p.detach().to(torch::kFloat).requires_grad_());
  }
  AdamW mine(low, {.lr = 1e-3, .weight_decay = 0.1, .master_weights = true});
  AdamW reference(full, {.lr = 1e-3, .weight_decay = 0.1});
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    set_gradients(low, seed);
    for (size_t i = 0; i < low.size(); ++i) {
      full[i].mutable_grad() = low[i].grad().to(torch::kFloat);
    }
    mine.step();
    reference.step();
  }
  const StateDict state = mine.state_dict().get<StateDict>("state");
  for (size_t i = 0; i < low.size(); ++i) {
    const auto& master = state.get<StateDict>(std::to_string(i)).get<Tensor>("master");
    EXPECT_TRUE(testing::close_in_norm(master, full[i].detach(), 1e-6));
    EXPECT_TRUE(same_bits(low[i].detach(), master.to(GetParam())));
  }
}

TEST_P(Masters, UnscaleAndSkipWithAScalerInTheSamePass) {
  const auto run = [&](double scale, bool with_skip) {
    const auto p = random_parameters(GetParam());
    AdamW optimizer(p, {.lr = 1e-2, .master_weights = true});
    GradScaler scaler({.init_scale = scale});
    scaler.scale(torch::ones({}));
    for (uint64_t seed = 1; seed <= 5; ++seed) {
      if (with_skip && seed % 2 == 1) {
        set_gradients(p, 9);
        p[0].mutable_grad().fill_(INFINITY);
        EXPECT_FALSE(scaler.step(optimizer));
        scaler.update(scale);
      }
      set_gradients(p, seed, scale);
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update(scale);
    }
    auto all = clones_of(p);
    const auto state = tensors_in(optimizer.state_dict());
    all.insert(all.end(), state.begin(), state.end());
    return all;
  };
  EXPECT_TRUE(same_bits(run(8, true), run(8, false)));
  EXPECT_TRUE(same_bits(run(8, false), run(1, false))) << "a power of two comes off exactly";
}

TEST_P(Masters, GoOnToTheBitAfterLoading) {
  const auto p = random_parameters(GetParam());
  AdamW optimizer(p, {.lr = 1e-2, .master_weights = true});
  testing::train(optimizer, p, 1, 3);
  const auto q = clones_of(p);
  for (const Tensor& t : q) {
    t.requires_grad_();
  }
  AdamW resumed(q, {.master_weights = true});
  resumed.load_state_dict(optimizer.state_dict());
  testing::train(optimizer, p, 4, 6);
  testing::train(resumed, q, 4, 6);
  EXPECT_TRUE(same_bits(clones_of(q), clones_of(p)));
}

// lr 1e-3 from 1.0 is below half of BF16's last place: nearest rounding would stay at 1, on average it moves by 1e-3.
TEST(StochasticRounding, MovesByTheUpdateOnAverage) {
  const Tensor p = torch::ones({1 << 14}, torch::kBFloat16).requires_grad_();
  AdamW optimizer({p}, {.lr = 1e-3, .weight_decay = 0, .stochastic_rounding = true});
  for (int i = 0; i < 100; ++i) {
    p.mutable_grad() = torch::ones_like(p);
    optimizer.step();
  }
  const Tensor end = p.detach().to(torch::kDouble);
  // Each of 16384 walks of 100 steps has a variance of at most 100 * (2^-8)^2 / 4, so the mean one of 1.5e-4 at most; 5
  // sigma.
  EXPECT_NEAR(end.mean().item<double>(), 0.9, 8e-4);
  EXPECT_GT(end.std().item<double>(), 1e-3) << "they must not all have been rounded alike";
}

// A parameter that is cut is updated in parts.
TEST(StochasticRounding, GivesPartsTheBitsOfTheWhole) {
  torch::manual_seed(1);
  const Tensor start = torch::randn({256}).to(torch::kBFloat16), more = torch::randn({10}).to(torch::kBFloat16);
  const std::vector whole = {start.clone().requires_grad_(), more.clone().requires_grad_()};
  const Tensor memory = start.clone();
  const std::vector parts = {memory.slice(0, 0, 128).detach().requires_grad_(),
                             memory.slice(0, 128, 256).detach().requires_grad_(), more.clone().requires_grad_()};
  const AdamWOptions options{.lr = 1e-3, .stochastic_rounding = true};
  AdamW one(whole, options), cut(parts, options), other({parts[1].detach().clone().requires_grad_()}, options);
  other.number_elements({128});
  for (uint64_t step = 1; step <= 3; ++step) {
    set_gradients(whole, step);
    const auto gradients = whole[0].grad().split(128);
    const auto of_other = other.param_groups()[0].params()[0];
    parts[0].mutable_grad() = gradients[0].clone();
    parts[1].mutable_grad() = gradients[1].clone();
    parts[2].mutable_grad() = whole[1].grad().clone();
    of_other.mutable_grad() = gradients[1].clone();
    one.step();
    cut.step();
    other.step();
    EXPECT_TRUE(same_bits(memory, whole[0].detach()));
    EXPECT_TRUE(same_bits(parts[2].detach(), whole[1].detach()));
    EXPECT_TRUE(same_bits(of_other.detach(), parts[1].detach())) << "where the first is elsewhere";
  }
}

// What other devices use.
TEST(StochasticRounding, HasTheSameNoiseInTensorArithmeticAsInTheKernel) {
  for (const uint64_t first : {uint64_t{0}, uint64_t{12345}, (uint64_t{1} << 32) - 500, (uint64_t{3} << 32) + 7}) {
    for (const uint64_t step : {1, 77}) {
      const Tensor noise = detail::rounding_noise(torch::tensor(static_cast<float>(step)), first, 1003);
      std::vector<int32_t> expected;
      for (uint64_t i = 0; i < 1003; ++i) {
        expected.push_back(static_cast<int32_t>(kernels::random_bits({.step = step, .offset = first}, i) >> 16));
      }
      EXPECT_TRUE(same_bits(noise, torch::tensor(expected, torch::kInt))) << first;
    }
  }
}

TEST(StochasticRounding, LeavesRepresentableValuesAlone) {
  torch::manual_seed(1);
  const Tensor p = torch::randn({1000}).to(torch::kBFloat16).requires_grad_();
  const Tensor before = p.detach().clone();
  AdamW optimizer({p}, {.lr = 0, .weight_decay = 0, .stochastic_rounding = true});
  p.mutable_grad() = torch::ones_like(p);
  optimizer.step();
  EXPECT_TRUE(same_bits(p.detach(), before));
}

TEST(LowPrecision, IsRefusedWithoutMastersOrRounding) {
  const auto error = [](torch::ScalarType dtype, AdamWOptions options) {
    const Tensor p = torch::ones({2}, dtype).requires_grad_();
    p.mutable_grad() = torch::ones_like(p);
    return error_of<ConfigError>([&] { AdamW({p}, options).step(); });
  };
  EXPECT_THAT(error(torch::kBFloat16, {}), HasSubstr("master_weights"));
  EXPECT_THAT(error(torch::kHalf, {.stochastic_rounding = true}), HasSubstr("stochastic_rounding is for BF16"));
  EXPECT_THAT(error(torch::kHalf, {.master_weights = true, .stochastic_rounding = true}), HasSubstr("choose one"));
}

}  // namespace
}  // namespace snug::low_precision_adamw_test
