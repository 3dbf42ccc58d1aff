// What loops of people have beside a model, an optimizer and a loss: gradients that are read or changed before the
// update, and metrics. The reference is a loop in plain LibTorch.

#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/clip.h"
#include "snug/core.h"
#include "snug/stepper.h"
#include "tests/step/adamw_training.h"
#include "tests/step/planned_training.h"

namespace snug::loops_test {
namespace {

using testing::AdamWTraining;
using ::testing::AllOf;
using testing::clones_of;
using testing::error_of;
using testing::everything;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::make_mlp;
using testing::regression_batch;
using testing::same_bits;
using testing::tiny_batch;
using testing::tiny_model;
using testing::planned::make_batch;
using testing::planned::PlannedTraining;
using torch::Tensor;

using Named = std::vector<std::pair<std::string, Tensor>>;

StepperOptions clamping(StepperOptions options = {}) {
  options.before_update = [](const std::vector<std::pair<std::string, torch::Tensor>>& parameters) {
    for (const auto& [name, parameter] : parameters) {
      parameter.grad().clamp_(-0.01, 0.01);
    }
  };
  return options;
}

// Runs three steps of micro-batches of 512 without a budget, and in less memory than that takes.
template <class Step>
void expect_the_same_within_a_budget(StepperOptions options, const Step& step) {
  options.micro_batch = 512;
  const Batch batch = make_batch(1024);
  const auto train = [&](Bytes budget) {
    options.budget.memory = budget;
    PlannedTraining run(options);
    int64_t peak = 0;
    std::vector<double> results;
    for (int i = 0; i < 3; ++i) {
      const StepResult result = step(run, batch);
      peak = std::max(peak, result.peak_bytes);
      results.insert(results.end(), {result.loss(), result.grad_norm()});
      if (budget.is_unlimited()) {
        continue;
      }
      EXPECT_LE(result.peak_bytes, budget.count());
      EXPECT_TRUE(run.stepper.plan()->activations) << "some are computed again";
    }
    return std::tuple(peak, results, run.state());
  };
  const auto [peak, results, state] = train(Bytes::unlimited());
  const auto [lower, again, planned] = train(Bytes(peak - (256 << 10)));
  EXPECT_EQ(again, results);
  EXPECT_TRUE(same_bits(planned, state));
}

// --- before_update

TEST(BeforeUpdate, ChangesGradientsBeforeClippingWithTheBitsOfAPlainLoop) {
  const Batch batch = regression_batch(8);
  for (const int64_t size : {8, 3}) {
    AdamWTraining run(clamping({.micro_batch = size, .clip_norm = 0.02}));
    auto model = make_mlp({6, 16, 3});
    AdamW optimizer(model->parameters(), {.lr = 0.01});
    for (int step = 0; step < 3; ++step) {
      const StepResult result = run.step(batch);
      optimizer.zero_grad();
      for (const Batch& micro : micro_batches(batch, size)) {
        ((model->forward(micro[0]) - micro[1]).pow(2).sum() / static_cast<double>(batch[1].numel())).backward();
      }
      torch::nn::utils::clip_grad_value_(model->parameters(), 0.01);
      EXPECT_EQ(result.grad_norm(), clip_grad_norm_(model->parameters(), 0.02).item<float>());
      optimizer.step();
      ASSERT_TRUE(same_bits(run.state(), everything(model, optimizer))) << size << ", " << step;
    }
  }
}

TEST(BeforeUpdate, HasTheSameBitsWithinABudget) {
  expect_the_same_within_a_budget(clamping(), [](PlannedTraining& run, const Batch& batch) { return run.step(batch); });
}

TEST(BeforeUpdate, SeesGradientsUnscaledAndAlsoThoseThatAreNotFinite) {
  std::vector<double> norms;
  bool is_asked = false;
  AdamWTraining run({.precision = Precision::Float16,
                     .sixteen_bit = {.scaler = {.init_scale = 64}},
                     .before_update =
                         [&](const Named& parameters) {
                           double squares = 0;
                           for (const auto& [name, parameter] : parameters) {
                             squares += parameter.grad().square().sum().item<double>();
                             parameter.grad().nan_to_num_(0).clamp_(-1, 1);
                           }
                           norms.push_back(std::sqrt(squares));
                         },
                     .accept_update =
                         [&](double, double) {
                           is_asked = true;
                           return true;
                         }});
  AdamWTraining plain;
  const Batch batch = regression_batch(4);
  EXPECT_TRUE(run.step(batch).stepped());
  EXPECT_NEAR(norms.front(), plain.step(batch).grad_norm(), 0.01 * norms.front());
  EXPECT_TRUE(std::exchange(is_asked, false));
  const auto before = run.state();
  const StepResult skipped = run.stepper.step(batch, [&](const Batch& micro) {
    const Loss loss = run.loss_of(micro);
    return Loss::sum(loss.value() * std::numeric_limits<float>::infinity(), loss.count());
  });
  EXPECT_FALSE(std::isfinite(norms.back()));
  EXPECT_FALSE(skipped.stepped());
  EXPECT_TRUE(same_bits(run.state(), before)) << "the scaler has seen them before the function";
  EXPECT_FALSE(is_asked) << "about an update that is left out";
}

TEST(BeforeUpdate, GetsTrainedParametersWithMastersUnderTheModelsNames) {
  const Batch batch = tiny_batch(6);
  const auto masters_after = [&](double factor, double rate) {
    auto model = tiny_model();
    model->to(torch::kBFloat16);
    model->parameters()[1].set_requires_grad(false);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(rate));
    std::vector<std::string> names;
    Stepper stepper(model, optimizer,
                    {.precision = Precision::BFloat16,
                     .weights = Weights::Low,
                     .micro_batch = 2,
                     .before_update = [&](const Named& parameters) {
                       for (const auto& [name, parameter] : parameters) {
                         EXPECT_EQ(parameter.scalar_type(), torch::kFloat);
                         parameter.grad().mul_(factor);
                         names.push_back(name);
                       }
                     }});
    stepper.step(batch, [&](const Batch& micro) {
      return testing::squared_error(model->forward(micro[0].to(torch::kBFloat16)), micro[1]);
    });
    EXPECT_EQ(names, (std::vector<std::string>{"0.weight", "3.weight", "3.bias", "5.weight", "5.bias"}));
    return clones_of(optimizer.param_groups()[0].params());
  };
  EXPECT_TRUE(same_bits(masters_after(0.5, 0.25), masters_after(1, 0.125)));
  EXPECT_FALSE(same_bits(masters_after(0.5, 0.25), masters_after(1, 0.25)));
}

TEST(BeforeUpdate, DropsTheStepByAnExceptionAndRefusesToWriteParameters) {
  bool fails = true;
  AdamWTraining run({.micro_batch = 2, .before_update = [&](const Named& parameters) {
                       if (std::exchange(fails, false)) {
                         throw std::runtime_error("mine");
                       }
                       if (parameters.front().second.grad().ge(1e9).any().item<bool>()) {
                         parameters.front().second.zero_();
                       }
                     }});
  const auto before = run.state();
  EXPECT_EQ(error_of<std::runtime_error>([&] { run.step(regression_batch(4)); }), "mine");
  EXPECT_TRUE(same_bits(run.state(), before));
  AdamWTraining other({.micro_batch = 2});
  run.step(regression_batch(4));
  other.step(regression_batch(4));
  EXPECT_TRUE(same_bits(run.state(), other.state()));
  EXPECT_THAT(error_of<ConfigError>([&] {
                run.stepper.step(regression_batch(4),
                                 [&](const Batch& micro) { return Loss::sum(run.loss_of(micro).value() * 1e15, 1); });
              }),
              AllOf(HasSubstr("'0.weight' was written"), HasSubstr("before_update")));
}

TEST(BeforeUpdate, DoesNotGoWithGradientNoise) {
  EXPECT_THAT(
      error_of<ConfigError>([] { const AdamWTraining run(clamping({.micro_batch = 2, .gradient_noise = true})); }),
      AllOf(HasSubstr("gradient_noise"), HasSubstr("before_update")));
}

TEST(Stepper, RefusesAnOptimizerThatNeedsAClosureWithTheCure) {
  auto model = tiny_model();
  torch::optim::LBFGS optimizer(model->parameters());
  EXPECT_THAT(error_of<ConfigError>([&] { Stepper(model, optimizer); }),
              AllOf(HasSubstr("LBFGS"), HasSubstr("optimizer.step(closure)"), HasSubstr("AccumulationWindow")));
}

// --- metrics

Loss with_metrics(const Loss& loss, const Tensor& predicted, const Tensor& target) {
  const Tensor error = (predicted - target).abs();
  return loss.with("error", error.sum()).with("close", (error < 0.5).sum());
}

TEST(Metrics, AreMeansOverAllItemsHoweverTheBatchIsSplit) {
  const Batch batch = regression_batch(8);
  for (const int64_t size : {8, 3}) {
    AdamWTraining run({.micro_batch = size});
    double error = 0, close = 0;
    for (const Batch& micro : micro_batches(batch, size)) {
      const Tensor of_one = (run.model->forward(micro[0]) - micro[1]).abs();
      error += of_one.sum().item<double>();
      close += (of_one < 0.5).sum().item<double>();
    }
    const StepResult result = run.stepper.step(batch, [&](const Batch& micro) {
      return with_metrics(run.loss_of(micro), run.model->forward(micro[0]), micro[1]);
    });
    EXPECT_EQ(result.metric("error"), error / 24);
    EXPECT_EQ(result.metric("close"), close / 24);
    EXPECT_GT(close, 0);
    EXPECT_EQ(result.loss(), AdamWTraining({.micro_batch = size}).step(batch).loss());
    EXPECT_THAT(error_of<ConfigError>([&] { result.metric("dice"); }), AllOf(HasSubstr("dice"), HasSubstr("error")));
  }
}

TEST(Metrics, OfMeansAreWeightedByTheCount) {
  AdamWTraining run({.micro_batch = 3});
  const StepResult result = run.stepper.step(regression_batch(7), [&](const Batch& micro) {
    return Loss::mean(run.loss_of(micro).value(), micro.size())
        .with("items", torch::full({}, static_cast<double>(micro.size())));
  });
  EXPECT_EQ(result.metric("items"), (3.0 * 3 + 3.0 * 3 + 1.0 * 1) / 7);
}

// A metric that backward needs too, and that a plan may drop.
TEST(Metrics, AreCountedOnceWithinABudget) {
  std::vector<double> plain, planned;
  expect_the_same_within_a_budget({}, [&](PlannedTraining& run, const Batch& batch) {
    const int before = run.calls;
    const StepResult result = run.stepper.step(batch, [&](const Batch& micro) {
      ++run.calls;
      const Tensor root = ((run.model->forward(micro[0]) - micro[1]).square().mean()).sqrt();
      return Loss::mean(root * root.exp(), micro.size()).with("root", root).with("calls", torch::ones({}));
    });
    EXPECT_EQ(result.metric("calls"), 1);
    (run.stepper.plan() ? planned : plain).push_back(result.metric("root"));
    EXPECT_GE(run.calls - before, 2);
    return result;
  });
  EXPECT_EQ(planned, plain);
}

TEST(Metrics, GoThroughAccumulateAndSkippedSteps) {
  AdamWTraining run(
      {.precision = Precision::Float16, .accumulate = {.every = 2}, .sixteen_bit = {.scaler = {.init_scale = 64}}});
  const auto add = [&](int64_t items, double factor) {
    return run.stepper.accumulate(regression_batch(items), [&](const Batch& micro) {
      return Loss::sum(run.loss_of(micro).value() * factor, micro.size())
          .with("twice", torch::full({}, 2 * micro.size()));
    });
  };
  EXPECT_FALSE(add(3, 1));
  EXPECT_EQ(add(4, 1)->metric("twice"), 2);
  add(3, 1);
  const auto skipped = add(4, std::numeric_limits<double>::infinity());
  EXPECT_FALSE(skipped->stepped());
  EXPECT_EQ(skipped->metric("twice"), 2);
}

TEST(Metrics, AreNotANumberWithoutItemsAndRefuseOtherNames) {
  AdamWTraining run({.micro_batch = 2});
  const auto step = [&](const std::function<Loss(const Loss&, const Batch&)>& with) {
    return run.stepper.step(regression_batch(4), [&](const Batch& micro) { return with(run.loss_of(micro), micro); });
  };
  const Tensor one = torch::ones({});
  const StepResult none =
      step([&](const Loss& loss, const Batch&) { return Loss::mean(loss.value(), 0).with("one", one); });
  EXPECT_TRUE(std::isnan(none.metric("one")));
  int calls = 0;
  EXPECT_THAT(error_of<ConfigError>([&] {
                step([&](const Loss& loss, const Batch&) { return ++calls == 1 ? loss : loss.with("one", one); });
              }),
              HasSubstr("different metrics, [] and [one]"));
  EXPECT_EQ(step([&](const Loss& loss, const Batch&) { return loss.with("one", one); }).metric("one"), 2.0 / 12);
}

}  // namespace
}  // namespace snug::loops_test
