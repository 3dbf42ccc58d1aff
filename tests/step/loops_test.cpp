// What loops of people have beside a model, an optimizer and a loss: gradients that are read or changed before the
// update, metrics, several optimizers, and tensors without a model. The reference is a loop in plain LibTorch.

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

#include "snug/adamw.h"
#include "snug/clip.h"
#include "snug/core.h"
#include "snug/stepper.h"
#include "tests/step/adamw_training.h"
#include "tests/step/planned_training.h"
#include "tests/support/temporary_folder.h"

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
                         [&](const StepResult&) {
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

// The scaler has looked before, and would let the update be made.
TEST(BeforeUpdate, MayMakeGradientsNotFiniteAndAcceptUpdateIsAsked) {
  bool spoils = false, is_accepted = true;
  int asked = 0;
  AdamWTraining run({.precision = Precision::Float16,
                     .sixteen_bit = {.scaler = {.init_scale = 64}},
                     .before_update =
                         [&](const Named& parameters) {
                           if (spoils) {
                             parameters.front().second.grad().fill_(std::numeric_limits<float>::quiet_NaN());
                           }
                         },
                     .accept_update =
                         [&](const StepResult& result) {
                           ++asked;
                           EXPECT_EQ(std::isnan(result.grad_norm()), spoils);
                           return is_accepted;
                         }});
  EXPECT_TRUE(run.step(regression_batch(4)).stepped());
  const auto before = run.state();
  spoils = true;
  is_accepted = false;
  EXPECT_FALSE(run.step(regression_batch(4)).stepped());
  EXPECT_EQ(asked, 2);
  EXPECT_TRUE(same_bits(run.state(), before));
  EXPECT_EQ(run.stepper.scaler().get_scale(), 64.0);
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

// As an early stop that forward decides: the metric is the whole step's, however the batch is split.
TEST(Metrics, AreKnownToAcceptUpdate) {
  for (const int64_t micro_batch : {0, 3}) {
    std::vector<double> asked;
    AdamWTraining run({.micro_batch = micro_batch, .accept_update = [&](const StepResult& result) {
                         asked.push_back(result.metric("target"));
                         return asked.size() != 2;
                       }});
    const Batch batch = regression_batch(8);
    for (int step = 0; step < 3; ++step) {
      const StepResult result = run.stepper.step(
          batch, [&](const Batch& micro) { return run.loss_of(micro).with("target", micro[1].sum()); });
      EXPECT_EQ(result.stepped(), step != 1);
      EXPECT_EQ(asked.back(), result.metric("target"));
    }
    EXPECT_NEAR(asked[0], batch[1].mean().item<double>(), 1e-6);
  }
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

// --- several optimizers

// A model of two halves, each with an optimizer.
template <class First, class Second>
struct TwoOptimizers {
  torch::nn::Sequential model = testing::planned::deep();
  std::vector<Tensor> half(bool of_first) const {
    const std::vector<Tensor> all = model->parameters();
    const auto middle = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
    return of_first ? std::vector<Tensor>(all.begin(), middle) : std::vector<Tensor>(middle, all.end());
  }
  First first{half(true), 0.01};
  Second second{half(false), 0.02};

  void slow_down() {
    for (torch::optim::Optimizer* one : std::vector<torch::optim::Optimizer*>{&first, &second}) {
      one->param_groups()[0].options().set_lr(one->param_groups()[0].options().get_lr() / 2);
    }
  }
  Loss loss_of(const Batch& micro) {
    return Loss::sum((model->forward(micro[0]) - micro[1]).pow(2).sum(), micro[1].numel());
  }
};
struct FastAdamW : AdamW {
  FastAdamW(const std::vector<Tensor>& parameters, double rate) : AdamW(parameters, {.lr = rate}) {}
};
using TorchAdamW = torch::optim::AdamW;

// Allocates before it writes, and fails to if asked. Not GradientScalingAware, so that others must leave its steps out.
struct Promising : torch::optim::SGD, UpdateAware {
  using SGD::SGD;
  bool before_writing(std::function<void()> hook) override {
    hook_ = std::move(hook);
    return true;
  }
  Tensor step(LossClosure /*closure*/ = nullptr) override {
    if (std::exchange(fails, false)) {
      throw std::runtime_error("no room");
    }
    if (const auto hook = std::exchange(hook_, nullptr)) {
      hook();
    }
    return SGD::step();
  }
  bool fails = false;
  std::function<void()> hook_;
};
struct Failing : Promising, GradientScalingAware {
  using Promising::Promising;
  void set_gradient_scaling(Tensor /*grad_scale*/, Tensor found_inf) override { found_inf_ = std::move(found_inf); }
  Tensor step(LossClosure closure = nullptr) override {
    const Tensor found_inf = std::exchange(found_inf_, {});
    return found_inf.defined() && found_inf.item<float>() != 0 ? Tensor() : Promising::step(std::move(closure));
  }
  Tensor found_inf_;
};

template <class First, class Second>
void expect_the_bits_of_two_optimizers() {
  const Batch batch = make_batch(8);
  TwoOptimizers<First, Second> run, plain;
  Stepper stepper(run.model, {&run.first, &run.second}, {.micro_batch = 3, .clip_norm = 0.05});
  for (int step = 0; step < 3; ++step) {
    const StepResult result = stepper.step(batch, [&](const Batch& micro) { return run.loss_of(micro); });
    plain.first.zero_grad();
    plain.second.zero_grad();
    for (const Batch& micro : micro_batches(batch, 3)) {
      (plain.loss_of(micro).value() / static_cast<double>(batch[1].numel())).backward();
    }
    EXPECT_EQ(result.grad_norm(), clip_grad_norm_(plain.model->parameters(), 0.05).template item<float>());
    plain.first.step();
    plain.second.step();
    ASSERT_TRUE(same_bits(clones_of(run.model->parameters()), clones_of(plain.model->parameters()))) << step;
    run.slow_down();
    plain.slow_down();
  }
}

TEST(SeveralOptimizers, HaveTheBitsOfAPlainLoopWithSchedulesOfTheirOwn) {
  expect_the_bits_of_two_optimizers<FastAdamW, FastAdamW>();
  expect_the_bits_of_two_optimizers<FastAdamW, torch::optim::SGD>();
  expect_the_bits_of_two_optimizers<torch::optim::SGD, Failing>();
  expect_the_bits_of_two_optimizers<TorchAdamW, TorchAdamW>();
}

template <class First, class Second>
void expect_counted_once() {
  const Batch batch = make_batch(1024);
  const auto train = [&](Bytes budget) {
    TwoOptimizers<First, Second> run;
    Stepper stepper(run.model, {&run.first, &run.second}, {.micro_batch = 512, .budget = {.memory = budget}});
    int64_t peak = 0;
    for (int i = 0; i < 3; ++i) {
      const StepResult result = stepper.step(batch, [&](const Batch& micro) { return run.loss_of(micro); });
      EXPECT_EQ(result.step_downs, 0);
      peak = std::max(peak, result.peak_bytes);
    }
    if (const auto plan = stepper.plan()) {
      EXPECT_TRUE(plan->activations);
      EXPECT_LE(peak, budget.count());
      const int64_t weights = testing::bytes_of(run.model->parameters());
      EXPECT_GE(plan->bytes.optimizer_state.in_memory, 2 * weights) << "of both";
      EXPECT_LE(plan->bytes.optimizer_state.in_memory, 2 * weights + 1024);
    }
    return std::pair(peak, clones_of(run.model->parameters()));
  };
  const auto [peak, plain] = train(Bytes::unlimited());
  EXPECT_TRUE(same_bits(train(Bytes(peak - (256 << 10))).second, plain));
}

TEST(SeveralOptimizers, AreCountedOnceWithinABudget) {
  expect_counted_once<FastAdamW, FastAdamW>();
  expect_counted_once<FastAdamW, TorchAdamW>();
}

// The gradient of one half alone is not finite.
template <class Second>
void expect_skipped_together() {
  TwoOptimizers<FastAdamW, Second> run;
  Stepper stepper(run.model, {&run.first, &run.second},
                  {.precision = Precision::Float16, .sixteen_bit = {.scaler = {.init_scale = 64}}});
  const Batch batch = make_batch(4);
  const auto step = [&] { return stepper.step(batch, [&](const Batch& micro) { return run.loss_of(micro); }); };
  EXPECT_TRUE(step().stepped());
  const auto before = clones_of(run.model->parameters());
  for (const bool first : {true, false}) {
    const Tensor bad = run.half(first).front();
    const auto hook = bad.register_hook([](const Tensor& gradient) { return gradient / 0; });
    EXPECT_FALSE(step().stepped());
    bad.remove_hook(hook);
    EXPECT_TRUE(same_bits(clones_of(run.model->parameters()), before));
  }
  EXPECT_EQ(stepper.scaler().get_scale(), 16.0);
  EXPECT_TRUE(step().stepped());
  EXPECT_FALSE(same_bits(clones_of(run.half(true)), std::vector<Tensor>(before.begin(), before.begin() + 7)));
}

TEST(SeveralOptimizers, SkipAStepTogether) {
  expect_skipped_together<FastAdamW>();
  expect_skipped_together<torch::optim::SGD>();
  expect_skipped_together<Promising>();
  expect_skipped_together<Failing>();
}

TEST(SeveralOptimizers, UpdateMastersAndGetTheModelsWeightsBack) {
  const Batch batch = make_batch(6);
  const auto train = [&](bool two) {
    TwoOptimizers<FastAdamW, FastAdamW> run;
    run.model->to(torch::kBFloat16);
    FastAdamW of_all(run.model->parameters(), 0.01);
    run.second.param_groups()[0].options().set_lr(0.01);
    {
      Stepper stepper(run.model,
                      two ? std::vector<torch::optim::Optimizer*>{&run.first, &run.second}
                          : std::vector<torch::optim::Optimizer*>{&of_all},
                      {.precision = Precision::BFloat16, .weights = Weights::Low, .micro_batch = 2});
      for (int i = 0; i < 2; ++i) {
        stepper.step(batch, [&](const Batch& micro) {
          const Tensor out = run.model->forward(micro[0].to(torch::kBFloat16)).to(torch::kFloat);
          return Loss::sum((out - micro[1]).pow(2).sum(), micro[1].numel());
        });
      }
    }
    EXPECT_TRUE(run.second.param_groups()[0].params()[0].is_same(run.half(false)[0]));
    return clones_of(run.model->parameters());
  };
  EXPECT_TRUE(same_bits(train(true), train(false)));
}

template <class First>
void expect_nothing_written_if_the_second_fails() {
  TwoOptimizers<First, Failing> run;
  TwoOptimizers<First, torch::optim::SGD> other;
  run.second.fails = true;
  Stepper stepper(run.model, {&run.first, &run.second}), plain(other.model, {&other.first, &other.second});
  const auto before = clones_of(run.model->parameters());
  const auto step = [&] { stepper.step(make_batch(4), [&](const Batch& micro) { return run.loss_of(micro); }); };
  EXPECT_EQ(error_of<std::runtime_error>(step), "no room");
  EXPECT_TRUE(same_bits(clones_of(run.model->parameters()), before));
  EXPECT_TRUE(run.first.state().empty());
  step();
  plain.step(make_batch(4), [&](const Batch& micro) { return other.loss_of(micro); });
  EXPECT_TRUE(same_bits(clones_of(run.model->parameters()), clones_of(other.model->parameters())));
}

TEST(SeveralOptimizers, WriteNothingIfOneFailsBeforeItWrites) {
  expect_nothing_written_if_the_second_fails<FastAdamW>();
  expect_nothing_written_if_the_second_fails<TorchAdamW>();
  expect_nothing_written_if_the_second_fails<torch::optim::SGD>();
}

TEST(SeveralOptimizers, OfOneParameterAreRefusedAlsoLater) {
  TwoOptimizers<FastAdamW, torch::optim::SGD> run;
  EXPECT_THAT(error_of<ConfigError>([&] { Stepper(run.model, {&run.first, &run.first}); }),
              HasSubstr("same parameter"));
  EXPECT_THAT(error_of<ConfigError>([&] { Stepper(run.model, {&run.first, nullptr}); }), HasSubstr("null"));
  EXPECT_THAT(error_of<ConfigError>([&] { Stepper(run.model, std::vector<torch::optim::Optimizer*>()); }),
              HasSubstr("none of the model's parameters"));
  Stepper stepper(run.model, {&run.first, &run.second});
  run.second.param_groups()[0].params().push_back(run.half(true)[0]);
  EXPECT_THAT(error_of<ConfigError>(
                  [&] { stepper.step(make_batch(4), [&](const Batch& micro) { return run.loss_of(micro); }); }),
              HasSubstr("same parameter"));
}

// The first half has 16 bits.
struct HalfInSixteenBits {
  torch::nn::Sequential model{torch::nn::Linear(4, 4), torch::nn::Linear(4, 4)};
  std::vector<Tensor> first, second;
  HalfInSixteenBits() {
    model[0]->to(torch::kBFloat16);
    first = model[0]->parameters();
    second = model[1]->parameters();
  }
};

TEST(SeveralOptimizers, AreAskedForTheParametersTheyHold) {
  HalfInSixteenBits run;
  const auto make = [&](const std::vector<Tensor>& low, const std::vector<Tensor>& full) {
    AdamW of_low(low, {.master_weights = true});
    torch::optim::SGD of_full(full, 0.1);
    Stepper(run.model, {&of_low, &of_full});
  };
  EXPECT_NO_THROW(make(run.first, run.second));
  EXPECT_THAT(error_of<ConfigError>([&] { make(run.second, run.first); }), HasSubstr("'0.weight' is BFloat16"));
}

TEST(SeveralOptimizers, DoNotGetMastersIfOneHasItsOwn) {
  HalfInSixteenBits run;
  run.model->to(torch::kBFloat16);
  for (const bool of_first : {true, false}) {
    AdamW one(run.first, {.stochastic_rounding = of_first});
    AdamW other(run.second, {.stochastic_rounding = !of_first});
    EXPECT_THAT(error_of<ConfigError>([&] {
                  Stepper(run.model, {&one, &other}, {.precision = Precision::BFloat16, .weights = Weights::Low});
                }),
                HasSubstr("own cure"));
  }
}

TEST(SeveralOptimizers, MayHoldAParameterTwiceInOne) {
  TwoOptimizers<torch::optim::SGD, torch::optim::SGD> run;
  std::vector<Tensor> tied = run.half(true);
  tied.push_back(tied[0]);
  torch::optim::SGD of_tied(tied, 0.1);
  Stepper stepper(run.model, {&of_tied, &run.second});
  EXPECT_TRUE(stepper.step(make_batch(4), [&](const Batch& micro) { return run.loss_of(micro); }).stepped());
}

TEST(SeveralOptimizers, AreLeftOutTogetherByAcceptUpdate) {
  TwoOptimizers<FastAdamW, torch::optim::SGD> run, other;
  bool accepts = false;
  Stepper stepper(run.model, {&run.first, &run.second}, {.accept_update = [&](const StepResult&) { return accepts; }});
  Stepper plain(other.model, {&other.first, &other.second});
  const auto before = clones_of(run.model->parameters());
  const auto step = [&] {
    return stepper.step(make_batch(4), [&](const Batch& micro) { return run.loss_of(micro); }).stepped();
  };
  EXPECT_FALSE(step());
  EXPECT_TRUE(same_bits(clones_of(run.model->parameters()), before));
  EXPECT_TRUE(run.first.state().empty());
  accepts = true;
  EXPECT_TRUE(step());
  plain.step(make_batch(4), [&](const Batch& micro) { return other.loss_of(micro); });
  EXPECT_TRUE(same_bits(clones_of(run.model->parameters()), clones_of(other.model->parameters())));
}

// Loss scaling and masters, so that the Stepper has a state, too.
TEST(SeveralOptimizers, GoOnFromTheirStatesWithTheSameBits) {
  struct InSixteenBits : TwoOptimizers<FastAdamW, FastAdamW> {
    InSixteenBits() { model->to(torch::kHalf); }
  };
  struct Run : InSixteenBits {
    Stepper stepper{model,
                    {&first, &second},
                    {.precision = Precision::Float16,
                     .weights = Weights::Low,
                     .sixteen_bit = {.scaler = {.init_scale = 64, .growth_interval = 2}}}};
    void step() {
      stepper.step(make_batch(4), [&](const Batch& micro) {
        const Tensor out = model->forward(micro[0].to(torch::kHalf)).to(torch::kFloat);
        return Loss::sum((out - micro[1]).pow(2).sum(), micro[1].numel());
      });
    }
    std::vector<Tensor> all() const {
      std::vector<Tensor> tensors = clones_of(model->parameters());
      for (const auto& [name, master] : stepper.full_precision_parameters()) {
        tensors.push_back(master.detach().clone());
      }
      return tensors;
    }
  };
  Run run, resumed;
  run.step();
  resumed.stepper.load_state_dict(run.stepper.state_dict());
  resumed.first.load_state_dict(run.first.state_dict());
  resumed.second.load_state_dict(run.second.state_dict());
  for (int i = 0; i < 3; ++i) {
    run.step();
    resumed.step();
    ASSERT_TRUE(same_bits(resumed.all(), run.all())) << i;
  }
  EXPECT_EQ(resumed.stepper.scaler().get_scale(), run.stepper.scaler().get_scale());
  EXPECT_GT(run.stepper.scaler().get_scale(), 64.0);
}

// --- tensors instead of a module

// Points and their colours, as in a scene: results grow with the points, not with the batch.
struct Scene {
  static Tensor made(int64_t rows) { return torch::randn({rows, testing::planned::kWidth}).mul_(0.1).requires_grad_(); }
  explicit Scene(int64_t points) {
    torch::manual_seed(1);
    parameters = {made(points), made(points)};
  }
  Loss loss_of(const Batch& micro) {
    ++calls;
    Tensor seen = micro[0].matmul(parameters[0].t());
    for (int i = 0; i < 12; ++i) {
      seen = (seen * 1.1).tanh();
    }
    return Loss::sum((seen.matmul(parameters[1]) - micro[1]).pow(2).sum(), micro[1].numel());
  }
  // Twice as many points, or half of them, as the next step's parameters.
  void densify(torch::optim::Optimizer& optimizer) {
    resize(optimizer, [](const Tensor& old) { return torch::cat({old.detach(), old.detach() * 1.1}); });
  }
  void prune(torch::optim::Optimizer& optimizer) {
    resize(optimizer, [](const Tensor& old) { return old.detach().slice(0, 0, old.size(0) / 2).clone(); });
  }
  void resize(torch::optim::Optimizer& optimizer, const std::function<Tensor(const Tensor&)>& resized) {
    auto& held = optimizer.param_groups()[0].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      optimizer.state().erase(parameters[i].unsafeGetTensorImpl());
      parameters[i] = resized(parameters[i]).requires_grad_();
      held[i] = parameters[i];
    }
  }

  std::vector<Tensor> parameters;
  int calls = 0;
};

template <class Optimizer, class... Options>
void expect_bits_of_replaced_parameters(const Options&... options) {
  const Batch batch = make_batch(8);
  Scene run(6), plain(6);
  Optimizer optimizer(run.parameters, options...), of_plain(plain.parameters, options...);
  Stepper stepper(run.parameters, optimizer, {.micro_batch = 3, .clip_norm = 0.05});
  for (int step = 0; step < 6; ++step) {
    stepper.step(batch, [&](const Batch& micro) { return run.loss_of(micro); });
    of_plain.zero_grad();
    for (const Batch& micro : micro_batches(batch, 3)) {
      (plain.loss_of(micro).value() / static_cast<double>(batch[1].numel())).backward();
    }
    clip_grad_norm_(plain.parameters, 0.05);
    of_plain.step();
    ASSERT_TRUE(same_bits(clones_of(run.parameters), clones_of(plain.parameters))) << step;
    if (step == 1 || step == 3) {
      const Tensor old = run.parameters[0];
      step == 1 ? run.densify(optimizer) : run.prune(optimizer);
      step == 1 ? plain.densify(of_plain) : plain.prune(of_plain);
      stepper.step(batch, [&](const Batch& micro) { return Loss::mean(run.loss_of(micro).value() * 0, 0); });
      EXPECT_EQ(old.use_count(), 1U) << "the Stepper has released it";
    }
  }
}

TEST(LooseParameters, HaveTheBitsOfAPlainLoopThatReplacesThem) {
  expect_bits_of_replaced_parameters<AdamW>(AdamWOptions{.lr = 0.01});
  expect_bits_of_replaced_parameters<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01));
}

TEST(LooseParameters, ThatGrowArePlannedAgainAndThatShrinkAreNot) {
  const Batch batch = make_batch(256);
  const auto train = [&](Bytes budget) {
    Scene run(256);
    AdamW optimizer(run.parameters, {.lr = 0.01});
    Stepper stepper(run.parameters, optimizer, {.micro_batch = 32, .budget = {.memory = budget}});
    std::vector<int64_t> peaks;
    for (int step = 0; step < 4; ++step) {
      const int before = run.calls;
      peaks.push_back(stepper.step(batch, [&](const Batch& micro) { return run.loss_of(micro); }).peak_bytes);
      EXPECT_LE(peaks.back(), budget.count());
      if (step == 1) {
        run.densify(optimizer);
      } else if (step == 2) {
        EXPECT_TRUE(budget.is_unlimited() || run.calls - before > 8) << "planned";
        run.prune(optimizer);
      } else if (step == 3) {
        EXPECT_EQ(run.calls - before, 8) << "not planned";
      }
      if (const auto plan = stepper.plan()) {
        EXPECT_EQ(plan->considered.find("Planned again: the step takes ") != std::string::npos, step >= 2) << step;
      }
    }
    return std::pair(peaks, clones_of(run.parameters));
  };
  const auto [peaks, plain] = train(Bytes::unlimited());
  EXPECT_TRUE(same_bits(train(Bytes(peaks[1] + (peaks[2] - peaks[1]) / 3)).second, plain));
}

TEST(LooseParameters, MayChangeTheirSizeInPlaceAndGetAnotherGroup) {
  const Batch batch = make_batch(8);
  Scene run(6), plain(6);
  torch::optim::SGD optimizer(run.parameters, 0.1), of_plain(plain.parameters, 0.1);
  Stepper stepper(run.parameters, optimizer, {.clip_norm = 0.05});
  for (int step = 0; step < 3; ++step) {
    if (step > 0) {
      for (Scene* scene : {&run, &plain}) {
        torch::optim::SGD& one = scene == &run ? optimizer : of_plain;
        if (step == 1) {
          for (const Tensor& parameter : scene->parameters) {
            parameter.mutable_grad().reset();
            parameter.set_data(torch::cat({parameter.detach(), parameter.detach()}));
          }
        } else {
          torch::manual_seed(2);
          scene->parameters.push_back(Scene::made(8));
          one.add_param_group(torch::optim::OptimizerParamGroup({scene->parameters.back()}));
        }
      }
    }
    const auto loss_of = [&](Scene& scene, const Batch& micro) {
      const Loss loss = scene.loss_of(micro);
      return step < 2 ? loss : Loss::sum(loss.value() + scene.parameters[2].square().sum(), loss.count());
    };
    stepper.step(batch, [&](const Batch& micro) { return loss_of(run, micro); });
    of_plain.zero_grad();
    (loss_of(plain, batch).value() / static_cast<double>(batch[1].numel())).backward();
    clip_grad_norm_(plain.parameters, 0.05);
    of_plain.step();
    ASSERT_TRUE(same_bits(clones_of(run.parameters), clones_of(plain.parameters))) << step;
  }
}

// An Adam for each tensor.
TEST(LooseParameters, OfSeveralOptimizersAreReplacedWithTheBitsOfAPlainLoop) {
  struct Run {
    Scene scene{6};
    torch::optim::Adam first{{scene.parameters[0]}, 0.01}, second{{scene.parameters[1]}, 0.02};

    void densify() {
      for (torch::optim::Adam* optimizer : {&first, &second}) {
        Tensor& held = optimizer->param_groups()[0].params()[0];
        optimizer->state().erase(held.unsafeGetTensorImpl());
        held = torch::cat({held.detach(), held.detach() * 1.1}).requires_grad_();
        scene.parameters[optimizer == &first ? 0 : 1] = held;
      }
    }
  } run, plain;
  const Batch batch = make_batch(8);
  Stepper stepper(run.scene.parameters, {&run.first, &run.second});
  for (int step = 0; step < 4; ++step) {
    if (step == 2) {
      run.densify();
      plain.densify();
    }
    stepper.step(batch, [&](const Batch& micro) { return run.scene.loss_of(micro); });
    plain.first.zero_grad();
    plain.second.zero_grad();
    (plain.scene.loss_of(batch).value() / static_cast<double>(batch[1].numel())).backward();
    plain.first.step();
    plain.second.step();
    ASSERT_TRUE(same_bits(clones_of(run.scene.parameters), clones_of(plain.scene.parameters))) << step;
  }
}

TEST(LooseParameters, RefuseAnotherOptimizerAndMasters) {
  Scene run(6), other(6);
  torch::optim::SGD optimizer(other.parameters, 0.1);
  const StepperOptions low{.precision = Precision::BFloat16, .weights = Weights::Low};
  const std::vector<torch::optim::Optimizer*> one{&optimizer}, none, twice{&optimizer, &optimizer}, null{nullptr};
  EXPECT_THAT(error_of<ConfigError>([&] { Stepper(run.parameters, optimizer); }),
              HasSubstr("holds none of the model's parameters"));
  EXPECT_THAT(error_of<ConfigError>([&] { Stepper(run.parameters, one); }),
              HasSubstr("holds none of the model's parameters"));
  EXPECT_THAT(error_of<ConfigError>([&] { Stepper(other.parameters, optimizer, low); }), HasSubstr("needs a module"));
  EXPECT_THAT(error_of<ConfigError>([&] { Stepper(other.parameters, one, low); }), HasSubstr("needs a module"));
  EXPECT_THAT(error_of<ConfigError>([&] { Stepper(other.parameters, none); }),
              HasSubstr("none of the model's parameters"));
  EXPECT_THAT(error_of<ConfigError>([&] { Stepper(other.parameters, twice); }), HasSubstr("same parameter"));
  EXPECT_THAT(error_of<ConfigError>([&] { Stepper(other.parameters, null); }), HasSubstr("null"));
}

// --- a new optimizer each epoch

// A Stepper whose optimizer starts anew, and a new Stepper with a folder for plans: the bits of new optimizers, and
// nothing is tried after the first epoch.
TEST(NewOptimizer, NeedsNoNewPlan) {
  const testing::TemporaryFolder folder;
  const Batch batch = make_batch(512);
  std::vector<int> calls;  // of loss_of, in each epoch
  const auto train = [&](bool is_cleared, const StepperOptions& options) {
    auto model = testing::planned::deep();
    std::optional<AdamW> optimizer;
    std::optional<Stepper> stepper;
    calls.clear();
    for (int epoch = 0; epoch < 3; ++epoch) {
      if (is_cleared && epoch > 0) {
        optimizer->state().clear();
      } else {
        stepper.reset();
        optimizer.emplace(model->parameters(), AdamWOptions{.lr = 0.01});
        stepper.emplace(model, *optimizer, options);
      }
      calls.push_back(0);
      for (int step = 0; step < 2; ++step) {
        const StepResult result = stepper->step(batch, [&](const Batch& micro) {
          ++calls.back();
          return Loss::sum((model->forward(micro[0]) - micro[1]).pow(2).sum(), micro[1].numel());
        });
        EXPECT_LE(result.peak_bytes, options.budget.memory.count());
      }
    }
    return clones_of(model->parameters());
  };
  const int64_t room = testing::planned::plain_bytes(batch, {}, [] { return testing::planned::deep(); }) * 6 / 10;
  const auto plain = train(false, {});
  for (const bool is_cleared : {true, false}) {
    StepperOptions options{.micro_batch = 512, .budget = {.memory = Bytes(testing::planned::live() + room)}};
    if (!is_cleared) {
      options.budget.plan_folder = folder.path();
    }
    EXPECT_TRUE(same_bits(train(is_cleared, options), plain));
    EXPECT_GT(calls[0], 2);
    EXPECT_EQ(calls[1], 2) << is_cleared;
    EXPECT_EQ(calls[2], 2) << is_cleared;
  }
}

// --- names

TEST(StepperName, IsInErrorsOfSnugOnly) {
  auto model = tiny_model();
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  EXPECT_THAT(error_of<ConfigError>([&] { Stepper(model, optimizer, {.name = "critic", .micro_batch = -1}); }),
              ::testing::StartsWith("Stepper 'critic': micro_batch is -1"));
  Stepper stepper(model, optimizer, {.name = "critic"});
  const auto step = [&](int64_t items) {
    stepper.step(tiny_batch(items), [](const Batch&) -> Loss { throw std::runtime_error("mine"); });
  };
  EXPECT_THAT(error_of<ConfigError>([&] { step(0); }), ::testing::StartsWith("Stepper 'critic'.step: the batch is"));
  EXPECT_EQ(error_of<std::runtime_error>([&] { step(1); }), "mine");
  struct Mine : ConfigError {
    using ConfigError::ConfigError;
  };
  EXPECT_EQ(error_of<Mine>([&] { stepper.step(tiny_batch(1), [](const Batch&) -> Loss { throw Mine("mine"); }); }),
            "mine");
  EXPECT_THAT(
      error_of<ConfigError>([&] {
        Stepper(model, optimizer, {.name = "critic", .micro_batch = 1}).step(tiny_batch(2), [&](const Batch& micro) {
          return Loss::whole(model->forward(micro[0]).sum());
        });
      }),
      ::testing::StartsWith("Stepper 'critic'.step: a Loss::whole"));
  PlannedTraining tight({.name = "actor", .budget = {.memory = Bytes(testing::planned::live() + (1 << 20))}});
  try {
    tight.step(make_batch(1));
    tight.step(testing::planned::two_large_items());
    ADD_FAILURE() << "fits";
  } catch (const BudgetExceeded& error) {
    EXPECT_THAT(error.what(), ::testing::StartsWith("Stepper 'actor'"));
  }
}

}  // namespace
}  // namespace snug::loops_test
