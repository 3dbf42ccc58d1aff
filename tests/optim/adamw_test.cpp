#include "snug/adamw.h"

#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/optimizers.h"
#include "tests/support/tensors.h"

namespace snug::adamw_test {
namespace {

using ::testing::AllOf;
using testing::clones_of;
using testing::error_of;
using testing::FailingAllocation;
using testing::for_each_failing_allocation;
using ::testing::HasSubstr;
using testing::large_parameters;
using testing::random_parameters;
using testing::same_bits;
using testing::set_gradients;
using testing::tensors_in;
using testing::train;
using torch::Tensor;
using torch::optim::OptimizerParamGroup;
using TorchOptions = torch::optim::AdamWOptions;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A step changes a parameter p by three roundings (decay, update, their order may differ) of at most u |p| each and by
// an update that both compute from the same numbers in about 20 operations, so to within 20 u of its size, which is at
// most 2 lr for these gradients; u = 2^-24, |p| < 4, lr = 0.01. Moments do not depend on the parameters, so errors add
// up and do not feed back.
TEST(AdamW, EqualsTorchsAdamWOverFiftySteps) {
  auto mine = random_parameters();
  auto theirs = random_parameters();
  AdamW optimizer(mine, {.lr = 0.01, .betas = {0.8, 0.95}, .eps = 1e-7, .weight_decay = 0.2});
  torch::optim::AdamW reference(theirs, TorchOptions(0.01).betas({0.8, 0.95}).eps(1e-7).weight_decay(0.2));
  const double u = std::ldexp(1.0, -24);
  for (int step = 1; step <= 50; ++step) {
    train(optimizer, mine, static_cast<uint64_t>(step), static_cast<uint64_t>(step));
    train(reference, theirs, static_cast<uint64_t>(step), static_cast<uint64_t>(step));
    const double bound = step * u * (3 * 4 + 20 * 2 * 0.01);
    for (size_t i = 0; i < mine.size(); ++i) {
      ASSERT_LE((mine[i] - theirs[i]).abs().max().item<double>(), bound) << "step " << step << ", parameter " << i;
    }
  }
}

TEST(AdamW, HasTheBitsOfTheFusedOperatorOnAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  auto expected = large_parameters();
  std::vector<Tensor> gradients, averages, squares, counts;
  for (const Tensor& parameter : expected) {
    gradients.push_back(parameter.grad());
    averages.push_back(torch::zeros_like(parameter));
    squares.push_back(torch::zeros_like(parameter));
    counts.push_back(torch::ones({}));
  }
  {
    const torch::NoGradGuard no_grad;
    at::_fused_adamw_(expected, gradients, averages, squares, {}, counts, 0.01, 0.9, 0.999, 0.01, 1e-8, false, false);
  }
  for (const int n : {1, 2, 3}) {
    at::set_num_threads(n);
    const auto parameters = large_parameters();
    AdamW(parameters, {.lr = 0.01, .weight_decay = 0.01}).step();
    EXPECT_TRUE(same_bits(clones_of(parameters), clones_of(expected))) << n << " threads";
  }
  at::set_num_threads(threads);
}

// The same in FP64, where rounding cannot hide a wrong formula: u is 2^-53.
TEST(AdamW, EqualsTorchsAdamWInDoublePrecisionToThirteenDigits) {
  auto mine = random_parameters(torch::kDouble);
  auto theirs = random_parameters(torch::kDouble);
  AdamW optimizer(mine, {.lr = 0.01, .weight_decay = 0.2});
  torch::optim::AdamW reference(theirs, TorchOptions(0.01).weight_decay(0.2));
  train(optimizer, mine, 1, 50);
  train(reference, theirs, 1, 50);
  for (size_t i = 0; i < mine.size(); ++i) {
    EXPECT_LE((mine[i] - theirs[i]).abs().max().item<double>(), 1e-13);
  }
}

TEST(AdamW, FirstStepIsWhatOneComputesByHand) {
  // m = (1 - b1) g, v = (1 - b2) g^2, both corrected by their factor: the update is lr g / (|g| + eps), after the
  // decay.
  const Tensor p = torch::tensor({1.0, -2.0}, torch::kDouble).requires_grad_();
  AdamW optimizer({p}, {.lr = 0.5, .eps = 0.25, .weight_decay = 0.1});
  p.mutable_grad() = torch::tensor({3.0, -0.25}, torch::kDouble);
  optimizer.step();
  EXPECT_NEAR(p[0].item<double>(), 1.0 * (1 - 0.05) - 0.5 * 3 / 3.25, 1e-14);
  EXPECT_NEAR(p[1].item<double>(), -2.0 * (1 - 0.05) + 0.5 * 0.25 / 0.5, 1e-14);
}

TEST(AdamW, HasTheDefaultsOfItsOptions) {
  AdamW optimizer(random_parameters());
  const auto& options = static_cast<const TorchOptions&>(optimizer.param_groups()[0].options());
  EXPECT_EQ(options.lr(), 1e-3);
  EXPECT_EQ(options.betas(), std::make_tuple(0.9, 0.999));
  EXPECT_EQ(options.eps(), 1e-8);
  EXPECT_EQ(options.weight_decay(), 0.01);
}

TEST(AdamW, EachGroupHasItsOptionsAndOneWithoutTakesTheDefaults) {
  auto p = random_parameters();
  auto q = random_parameters();
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector{p[0]}, std::make_unique<TorchOptions>(TorchOptions(0.5).weight_decay(0)));
  groups.emplace_back(std::vector{p[1], p[2]});
  AdamW optimizer(groups, {.lr = 0.125, .weight_decay = 0.3});
  AdamW first({q[0]}, {.lr = 0.5, .weight_decay = 0});
  AdamW second({q[1], q[2]}, {.lr = 0.125, .weight_decay = 0.3});
  for (uint64_t step = 1; step <= 3; ++step) {
    set_gradients(p, step);
    set_gradients(q, step);
    optimizer.step();
    first.step();
    second.step();
  }
  EXPECT_TRUE(same_bits(clones_of(p), clones_of(q)));
}

TEST(AdamW, WorksWithTorchsSchedulers) {
  auto p = random_parameters();
  auto q = random_parameters();
  AdamW scheduled(p, {.lr = 0.5});
  AdamW by_hand(q, {.lr = 0.5});
  torch::optim::StepLR schedule(scheduled, /*step_size=*/2, /*gamma=*/0.5);
  std::vector<double> rates;
  for (uint64_t step = 1; step <= 5; ++step) {
    rates.push_back(scheduled.param_groups()[0].options().get_lr());
    by_hand.param_groups()[0].options().set_lr(rates.back());
    train(scheduled, p, step, step);
    train(by_hand, q, step, step);
    schedule.step();
  }
  EXPECT_EQ(rates, (std::vector<double>{0.5, 0.5, 0.5, 0.25, 0.25}))
      << "torch's StepLR decays after step_size + 1 calls";
  EXPECT_TRUE(same_bits(clones_of(p), clones_of(q)));
}

TEST(AdamW, LeavesParametersWithoutGradientAloneAndGivesThemNoState) {
  auto p = random_parameters();
  const Tensor untouched = p[1].detach().clone();
  AdamW optimizer(p);
  set_gradients(p, 1);
  p[1].mutable_grad().reset();
  optimizer.step();
  EXPECT_TRUE(same_bits(p[1], untouched));
  const StateDict state = optimizer.state_dict().get<StateDict>("state");
  EXPECT_TRUE(state.contains("0"));
  EXPECT_FALSE(state.contains("1"));
  EXPECT_TRUE(state.contains("2"));
}

TEST(AdamW, AParameterThatJoinsLaterHasItsOwnStepCount) {
  auto p = random_parameters();
  AdamW optimizer(p);
  set_gradients(p, 1);
  p[1].mutable_grad().reset();
  optimizer.step();
  train(optimizer, p, 2, 2);
  const StateDict state = optimizer.state_dict().get<StateDict>("state");
  EXPECT_EQ(state.get<StateDict>("0").get<Tensor>("step").item<float>(), 2);
  EXPECT_EQ(state.get<StateDict>("1").get<Tensor>("step").item<float>(), 1);
}

TEST(AdamW, KeepsGradientsAsTheyAre) {
  auto p = random_parameters();
  AdamW optimizer(p);
  set_gradients(p, 1);
  const auto gradients = testing::gradients_of(p);
  optimizer.step();
  EXPECT_TRUE(same_bits(testing::gradients_of(p), gradients));
}

TEST(AdamW, UpdatesFloatAndDoubleParametersOfOneGroup) {
  const auto f = random_parameters();
  const auto d = random_parameters(torch::kDouble);
  const auto f_alone = random_parameters();
  const auto d_alone = random_parameters(torch::kDouble);
  AdamW together({f[0], d[0], f[1], d[1]});
  AdamW floats({f_alone[0], f_alone[1]});
  AdamW doubles({d_alone[0], d_alone[1]});
  for (const auto* parameters : {&f, &d, &f_alone, &d_alone}) {
    set_gradients(*parameters, 3);
  }
  together.step();
  floats.step();
  doubles.step();
  for (const size_t i : {0, 1}) {
    EXPECT_TRUE(same_bits(f[i], f_alone[i]));
    EXPECT_TRUE(same_bits(d[i], d_alone[i]));
  }
}

// Autograd finds a weight that changed between forward and backward by its version, which the kernel does not count up
// by itself.
TEST(AdamW, AStepBetweenForwardAndBackwardIsAnErrorInBackward) {
  const Tensor p = torch::ones({3}, torch::requires_grad());
  AdamW optimizer({p});
  const Tensor loss = (p * p).sum();
  p.mutable_grad() = torch::ones({3});
  optimizer.step();
  EXPECT_THAT(error_of<c10::Error>([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"));
}

// The kernel walks raw memory, so layouts must be brought together first.
TEST(AdamW, UpdatesTensorsOfAnyMemoryLayout) {
  const auto check = [](const Tensor& start, const Tensor& gradient) {
    const Tensor plain = start.detach().contiguous().clone().requires_grad_();
    const Tensor other = start.detach().clone(torch::MemoryFormat::Preserve).requires_grad_();
    ASSERT_EQ(other.strides(), start.strides());
    AdamW a({plain}, {.lr = 0.1});
    AdamW b({other}, {.lr = 0.1});
    for (int step = 0; step < 2; ++step) {
      plain.mutable_grad() = gradient.contiguous();
      other.mutable_grad() = gradient;
      a.step();
      b.step();
    }
    EXPECT_TRUE(same_bits(other, plain));
  };
  torch::manual_seed(2);
  const Tensor matrix = torch::randn({4, 6});
  const Tensor images = torch::randn({2, 3, 4, 5});
  {
    SCOPED_TRACE("gradient transposed");
    check(matrix, torch::randn({6, 4}).t());
  }
  {
    SCOPED_TRACE("parameter transposed");
    check(torch::randn({6, 4}).t(), torch::randn({4, 6}));
  }
  {
    SCOPED_TRACE("gradient expanded");
    check(matrix, torch::randn({1, 6}).expand({4, 6}));
  }
  {
    SCOPED_TRACE("parameter channels last");
    check(images.contiguous(torch::MemoryFormat::ChannelsLast), torch::randn({2, 3, 4, 5}));
  }
}

TEST(AdamW, AParameterThatIsAViewIntoALargerTensorChangesNothingElse) {
  const Tensor storage = torch::ones({4, 5});
  const Tensor column = storage.select(1, 2).detach().requires_grad_();
  const auto build_and_step = [&] {
    AdamW optimizer({column}, {.lr = 0.1});
    column.mutable_grad() = torch::ones({4});
    optimizer.step();
  };
  EXPECT_THAT(error_of<ConfigError>(build_and_step), AllOf(HasSubstr("parameter 0"), HasSubstr("contiguous()")));
  EXPECT_TRUE(torch::equal(storage, torch::ones({4, 5})));
}

TEST(AdamW, AParameterThatIsGivenTwiceIsUpdatedOnceOrIsAnError) {
  auto p = random_parameters();
  auto q = random_parameters();
  AdamW twice({p[0], p[1], p[0]});  // parameters() of a model with a shared module
  AdamW once({q[0], q[1]});
  train(twice, {p[0], p[1]}, 1, 3);
  train(once, {q[0], q[1]}, 1, 3);
  EXPECT_TRUE(same_bits(clones_of(p), clones_of(q)));
  EXPECT_THAT(error_of<ConfigError>([&] { AdamW(std::vector<OptimizerParamGroup>{{{p[0]}}, {{p[1], p[0]}}}); }),
              HasSubstr("parameter 0"));
}

// --- what it refuses

TEST(AdamW, RefusesOptionsOutOfRange) {
  const auto message = [](const AdamWOptions& o) {
    return error_of<ConfigError>([&] { AdamW(random_parameters(), o); });
  };
  EXPECT_THAT(message({.lr = std::numeric_limits<double>::infinity()}), HasSubstr("lr is inf"));
  EXPECT_THAT(message({.betas = {1, 0.999}}), HasSubstr("beta1 is 1"));
  EXPECT_THAT(message({.betas = {0.9, -0.1}}), HasSubstr("beta2 is -0.1"));
  EXPECT_THAT(message({.eps = -1}), HasSubstr("eps is -1"));
  EXPECT_THAT(message({.weight_decay = kNan}), HasSubstr("weight_decay is nan"));
}

TEST(AdamW, RefusesOptionsOfAnotherOptimizerAndAmsgrad) {
  auto p = random_parameters();
  std::vector<OptimizerParamGroup> sgd;
  sgd.emplace_back(std::vector{p[0]}, std::make_unique<torch::optim::SGDOptions>(0.1));
  EXPECT_THAT(error_of<ConfigError>([&] { AdamW optimizer(sgd); }), HasSubstr("torch::optim::AdamWOptions"));
  std::vector<OptimizerParamGroup> amsgrad;
  amsgrad.emplace_back(std::vector{p[0]}, std::make_unique<TorchOptions>(TorchOptions().amsgrad(true)));
  EXPECT_THAT(error_of<ConfigError>([&] { AdamW optimizer(amsgrad); }), HasSubstr("amsgrad"));
}

// --- closures

TEST(AdamW, CallsAClosureWithGradientsOnAndReturnsItsLoss) {
  auto p = random_parameters();
  AdamW optimizer(p);
  const Tensor before = p[2].detach().clone();
  const torch::NoGradGuard no_grad;
  const Tensor loss = optimizer.step([&] {
    EXPECT_TRUE(torch::GradMode::is_enabled());
    Tensor l = p[2] * p[2];
    l.backward();
    return l;
  });
  EXPECT_EQ(loss.item<float>(), (before * before).item<float>());
  EXPECT_FALSE(same_bits(p[2], before));
  EXPECT_FALSE(optimizer.step().defined());
}

TEST(AdamW, AClosureTogetherWithAScalerIsAnErrorOnce) {
  auto p = random_parameters();
  AdamW optimizer(p);
  set_gradients(p, 1);
  optimizer.set_gradient_scaling({}, torch::zeros({}));
  const auto closure = [] { return torch::zeros({}); };
  EXPECT_THAT(error_of<ConfigError>([&] { optimizer.step(closure); }), HasSubstr("closure"));
  EXPECT_NO_THROW(optimizer.step(closure)) << "the scaling was for that one step";
}

// --- running out of memory

std::vector<OptimizerParamGroup> two_groups(const std::vector<Tensor>& p) { return {{{p[0], p[1]}}, {{p[2]}}}; }

TEST(AdamW, WhicheverAllocationFailsAllIsOldAndTheStepCanBeMadeAgain) {
  auto p = random_parameters();
  AdamW reference(two_groups(p), {.lr = 0.1});
  train(reference, p, 1, 2);
  for (const uint64_t steps_before : {0u, 1u}) {
    auto q = random_parameters();
    AdamW optimizer(two_groups(q), {.lr = 0.1});
    train(optimizer, q, 1, steps_before);
    const auto old_parameters = clones_of(q);
    const auto old_state = tensors_in(optimizer.state_dict());
    set_gradients(q, steps_before + 1);
    const int64_t failures = for_each_failing_allocation([&](FailingAllocation& allocation) {
      if (allocation.stops([&] { optimizer.step(); })) {
        ASSERT_TRUE(same_bits(clones_of(q), old_parameters));
        ASSERT_TRUE(same_bits(tensors_in(optimizer.state_dict()), old_state));
      }
    });
    if (steps_before == 0) {
      EXPECT_GE(failures, 9) << "three tensors of state for each parameter";
      train(optimizer, q, 2, 2);
    }
    EXPECT_TRUE(same_bits(clones_of(q), clones_of(p)));
    EXPECT_TRUE(same_bits(tensors_in(optimizer.state_dict()), tensors_in(reference.state_dict())));
  }
}

}  // namespace
}  // namespace snug::adamw_test
