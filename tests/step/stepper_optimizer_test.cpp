#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/clip.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/sgd.h"
#include "snug/stepper.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

// The optimizer need not hold what the model trains: it may hold more, less, or come to hold other things.

namespace snug::stepper_optimizer_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::same_bits;
using testing::tiny_batch;
using testing::tiny_model;
using torch::Tensor;

// A model with a learned temperature outside of it, which the optimizer holds too.
struct WithTemperature {
  torch::nn::Sequential model = tiny_model();
  Tensor temperature = torch::tensor(2.0f, torch::requires_grad());

  std::vector<Tensor> parameters() const {
    auto all = model->parameters();
    all.push_back(temperature);
    return all;
  }
  Tensor sum_of_squares(const Batch& batch) {
    return ((model->forward(batch[0]) * temperature).to(torch::kFloat) - batch[1]).square().sum();
  }
  Loss loss_of(const Batch& batch) { return Loss::sum(sum_of_squares(batch), batch[1].numel()); }
};

TEST(StepperOptimizer, MayHoldParametersBesidesTheModels) {
  const Batch batch =
      tiny_batch(10);  // 4 + 4 + 2: the provisional divisor is 3 * 4 items' and must be corrected for all
  WithTemperature reference;
  (reference.sum_of_squares(batch) / static_cast<double>(batch[1].numel())).backward();
  const double norm = grad_norm(reference.parameters()).item<double>();

  for (const auto precision : {Precision::Float32, Precision::Float16}) {
    WithTemperature run;
    torch::optim::SGD optimizer(run.parameters(), torch::optim::SGDOptions(0.1));
    Stepper stepper(run.model, optimizer, {.precision = precision, .micro_batch = 4, .clip_norm = norm / 4});
    const auto result = stepper.step(batch, [&](const Batch& micro) { return run.loss_of(micro); });
    const double tolerance = precision == Precision::Float32 ? 1e-5 : 1e-2;
    EXPECT_NEAR(result.grad_norm(), norm, norm * tolerance);
    EXPECT_NEAR(run.temperature.grad().item<double>(), reference.temperature.grad().item<double>() / 4,
                std::abs(reference.temperature.grad().item<double>()) * tolerance);
  }
}

TEST(StepperOptimizer, AParameterOutsideOfTheModelMustNotBeWrittenInsideTheWindowEither) {
  WithTemperature run;
  torch::optim::SGD optimizer(run.parameters(), torch::optim::SGDOptions(0.1));
  Stepper stepper(run.model, optimizer, {.micro_batch = 2});
  EXPECT_THAT(error_of<ConfigError>([&] {
                stepper.step(tiny_batch(4), [&](const Batch& micro) {
                  const Loss loss = run.loss_of(micro);
                  const torch::NoGradGuard no_grad;
                  run.temperature.mul_(1);
                  return loss;
                });
              }),
              HasSubstr("6 of the optimizer"));
  EXPECT_FALSE(run.temperature.grad().defined()) << "its gradient is dropped with the others";
}

// Clipping by the norm of gradients that were never unscaled would shrink the others by the loss scale.
TEST(StepperOptimizer, MayHoldAPartOfTheModelUnderLossScalingAndClipping) {
  const Batch batch = tiny_batch(8);
  const auto head_after_a_step = [&](Precision precision) {
    auto model = tiny_model();
    torch::optim::SGD head(model->children().back()->parameters(), torch::optim::SGDOptions(0.1));
    Stepper stepper(model, head, {.precision = precision, .clip_norm = 0.01});
    const auto result = stepper.step(
        batch, [&](const Batch& micro) { return testing::squared_error(model->forward(micro[0]), micro[1]); });
    EXPECT_TRUE(result.stepped());
    return testing::clones_of(head.param_groups()[0].params());
  };
  const auto full = head_after_a_step(Precision::Float32);
  const auto half = head_after_a_step(Precision::Float16);
  auto model = tiny_model();
  const auto before = model->children().back()->parameters();
  double moved = 0;
  for (size_t i = 0; i < full.size(); ++i) {
    EXPECT_LT((full[i] - half[i]).norm().item<double>(), 1e-5);
    moved += (full[i] - before[i]).square().sum().item<double>();
  }
  EXPECT_NEAR(std::sqrt(moved), 0.1 * 0.01, 1e-7);
}

TEST(StepperOptimizer, ParametersMayBeFrozenAndUnfrozenBetweenSteps) {
  const Batch batch = tiny_batch(10);
  const auto train = [&](bool new_stepper) {
    auto model = tiny_model();
    const Tensor first = model->parameters().front();
    first.set_requires_grad(false);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
    auto stepper = std::make_unique<Stepper>(model, optimizer, StepperOptions{.micro_batch = 4});
    const auto step = [&] {
      stepper->step(batch,
                    [&](const Batch& micro) { return testing::squared_error(model->forward(micro[0]), micro[1]); });
    };
    step();
    first.set_requires_grad(true);
    if (new_stepper) {
      stepper = std::make_unique<Stepper>(model, optimizer, StepperOptions{.micro_batch = 4});
    }
    step();
    return testing::clones_of(model->parameters());
  };
  EXPECT_TRUE(same_bits(train(false), train(true)));
}

TEST(StepperOptimizer, ALayerThatIsAddedBetweenStepsIsTrainedAndItsNameIsInErrors) {
  const Batch batch = tiny_batch(4);
  auto model = tiny_model();
  AdamW optimizer(model->parameters());
  Stepper stepper(model, optimizer, {.micro_batch = 2});
  const auto loss_of = [&](const Batch& micro) { return testing::squared_error(model->forward(micro[0]), micro[1]); };
  stepper.step(batch, loss_of);
  const int64_t width = batch[1].size(1);
  torch::nn::Linear added(width, width);
  model->push_back("added", added);
  optimizer.add_param_group(torch::optim::OptimizerParamGroup(added->parameters()));
  const Tensor before = added->weight.detach().clone();
  EXPECT_TRUE(stepper.step(batch, loss_of).stepped());
  EXPECT_FALSE(same_bits(added->weight, before));
  const auto writing = [&](const Batch& micro) {
    const torch::NoGradGuard no_grad;
    added->bias.add_(1);
    const torch::AutoGradMode grad(true);
    return loss_of(micro);
  };
  EXPECT_THAT(error_of<ConfigError>([&] { stepper.step(batch, writing); }), HasSubstr("'added.bias'"));
}

TEST(StepperOptimizer, TakesSparseGradients) {
  const auto train = [](bool sparse) {
    torch::manual_seed(1);
    auto embedding = torch::nn::Embedding(torch::nn::EmbeddingOptions(8, 2).sparse(sparse));
    torch::optim::SGD optimizer(embedding->parameters(), torch::optim::SGDOptions(0.1));
    Stepper stepper(embedding, optimizer, {.micro_batch = 2, .clip_norm = 0.5});
    const auto result = stepper.step(Batch{torch::tensor({1, 3, 1, 5, 3})}, [&](const Batch& micro) {
      return Loss::sum(embedding->forward(micro[0]).square().sum(), micro.size());
    });
    EXPECT_GT(result.grad_norm(), 0.5);
    return embedding->weight.detach().clone();
  };
  EXPECT_TRUE(testing::close_in_norm(train(true), train(false), 1e-6));
}

// A target that is ignored does not count, so the divisor of the first micro-batch is corrected.
TEST(StepperOptimizer, TakesSparseGradientsOfMicroBatchesWithOtherCounts) {
  const auto train = [](bool sparse) {
    torch::manual_seed(1);
    auto embedding = torch::nn::Embedding(torch::nn::EmbeddingOptions(8, 2).sparse(sparse));
    torch::optim::SGD optimizer(embedding->parameters(), torch::optim::SGDOptions(0.1));
    Stepper stepper(embedding, optimizer, {.micro_batch = 2});
    stepper.step(Batch{torch::tensor({1, 3, 0, 5, 3})}, [&](const Batch& micro) {
      const Tensor counted = micro[0].masked_select(micro[0] > 0);
      return Loss::sum(embedding->forward(counted).square().sum(), counted.numel());
    });
    return embedding->weight.detach().clone();
  };
  EXPECT_TRUE(testing::close_in_norm(train(true), train(false), 1e-6));
}

// The first step also makes the optimizer's state, which is no activation.
TEST(StepResultTest, ActivationPeakIsThatOfForwardAndBackwardWithoutGradientsOrOptimizerState) {
  const Batch batch = tiny_batch(256);
  auto model = tiny_model();
  AdamW optimizer(model->parameters());
  Stepper stepper(model, optimizer);
  const auto loss_of = [&](const Batch& micro) { return testing::squared_error(model->forward(micro[0]), micro[1]); };
  const auto first = stepper.step(batch, loss_of);
  const auto second = stepper.step(batch, loss_of);
  EXPECT_EQ(first.activation_peak_bytes, second.activation_peak_bytes);
  EXPECT_GT(first.activation_peak_bytes, 256 * (16 + 16) * 4) << "two tanh outputs are saved";

  Stepper parts(model, optimizer, {.micro_batch = 8});
  EXPECT_LT(parts.step(batch, loss_of).activation_peak_bytes, first.activation_peak_bytes / 8);
}

// The sample shows what backward made, not what clipping left of it.
TEST(StepResultTest, GradientStatisticsAreTakenBeforeClippingAndOnlyWhereAskedFor) {
  const auto sample = [](double clip) {
    auto model = tiny_model();
    SGD optimizer(model->parameters(), {.lr = 0.1});
    Stepper stepper(model, optimizer, {.clip_norm = clip});
    const auto loss_of = [&](const Batch& micro) { return testing::squared_error(model->forward(micro[0]), micro[1]); };
    stepper.sample_gradients();
    const auto result = stepper.step(tiny_batch(4), loss_of);
    EXPECT_TRUE(stepper.step(tiny_batch(4), loss_of).gradient_statistics.empty());
    EXPECT_EQ(result.gradient_statistics.size(), 6u);
    return result.gradient_statistics.front().exponents;
  };
  EXPECT_EQ(sample(0), sample(1e-6));
}

TEST(StepResultTest, TellsTheShareOfLostUpdatesIn16BitsOfAStepThatWasMade) {
  const auto sample = [](StepperOptions options, double lr) {
    auto model = tiny_model();
    SGD optimizer(model->parameters(), {.lr = lr});
    Stepper stepper(model, optimizer, options);
    const auto loss_of = [&](const Batch& micro) { return testing::squared_error(model->forward(micro[0]), micro[1]); };
    stepper.sample_gradients();
    return stepper.step(tiny_batch(4), loss_of).gradient_statistics.front().lost_updates;
  };
  EXPECT_FALSE(sample({.precision = Precision::Float32}, 1e-6).has_value());
  EXPECT_GT(sample({.precision = Precision::BFloat16}, 1e-6).value(), 0.9);
  EXPECT_LT(sample({.precision = Precision::BFloat16}, 10).value(), 0.1);
  const GradScalerOptions overflows{.init_scale = 0x1p100};
  EXPECT_FALSE(sample({.precision = Precision::Float16, .sixteen_bit = {.scaler = overflows}}, 1e-6).has_value())
      << "a skipped step";
}

// The norm of the first micro-batch's own mean gradient, whatever divisor and loss scale were used on the way.
TEST(StepResultTest, FirstGradNormIsThatOfTheFirstMicroBatchAlone) {
  const Batch batch = tiny_batch(10);
  const auto norm_of = [](const Batch& part) {
    auto model = tiny_model();
    torch::mse_loss(model->forward(part[0]), part[1]).backward();
    return grad_norm(model->parameters()).item<double>();
  };
  for (const auto precision : {Precision::Float32, Precision::Float16}) {
    auto model = tiny_model();
    SGD optimizer(model->parameters(), {.lr = 0.1});
    Stepper stepper(model, optimizer,
                    {.precision = precision,
                     .micro_batch = 4,
                     .sixteen_bit = {.scaler = {.init_scale = 64}},
                     .gradient_noise = true});
    const auto loss_of = [&](const Batch& micro) { return testing::squared_error(model->forward(micro[0]), micro[1]); };
    const auto result = stepper.step(batch, loss_of);
    const double tolerance = precision == Precision::Float32 ? 1e-5 : 1e-2;
    EXPECT_NEAR(result.first_grad_norm(), norm_of(micro_batches(batch, 4)[0]), tolerance);
    EXPECT_NEAR(result.grad_norm(), norm_of(batch), tolerance);
    EXPECT_EQ(result.first_batch_items, 4);
    EXPECT_EQ(result.batch_items, 10);
    EXPECT_TRUE(std::isnan(stepper.step(tiny_batch(4), loss_of).first_grad_norm()))
        << "there is nothing to compare with";
  }
}

}  // namespace
}  // namespace snug::stepper_optimizer_test
