// loss_of that writes parameters in forward, as a layer does that masks its own weight.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/stepper.h"
#include "tests/support/tensors.h"

namespace snug::written_parameters_test {
namespace {

using testing::clones_of;
using ::testing::HasSubstr;
using testing::same_bits;
using ::testing::ThrowsMessage;

// The first column of the weight is set to zero in each forward, as PixelCNN does.
struct MaskedImpl : torch::nn::Module {
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(16, 16));

  torch::Tensor forward(const torch::Tensor& x) {
    {
      const torch::NoGradGuard no_grad;
      linear->weight.index_put_({torch::indexing::Slice(), 0}, 0.0);
    }
    return linear->forward(x).tanh();
  }
};
TORCH_MODULE(Masked);

class WrittenParameters : public ::testing::Test {
 protected:
  WrittenParameters() { torch::manual_seed(1); }

  Loss loss_of(const Batch& batch) { return Loss::mean(model->forward(batch[0]).square().mean(), batch.size()); }
  StepResult step(Stepper& stepper) {
    return stepper.step({data}, [this](const Batch& batch) { return loss_of(batch); });
  }

  Masked model;
  torch::Tensor data = torch::randn({8, 16});
  AdamW optimizer = AdamW(model->parameters(), {.lr = 0.1});
};

TEST_F(WrittenParameters, AreTrainedAsByThePlainLoopInOneMicroBatch) {
  Stepper stepper(model, optimizer);
  const auto start = clones_of(model->parameters());
  for (int i = 0; i < 3; ++i) {
    step(stepper);
  }
  const auto trained = clones_of(model->parameters());

  const auto parameters = model->parameters();
  for (size_t i = 0; i < start.size(); ++i) {
    const torch::NoGradGuard no_grad;
    parameters[i].copy_(start[i]);
  }
  AdamW plain(model->parameters(), {.lr = 0.1});
  for (int i = 0; i < 3; ++i) {
    plain.zero_grad();
    model->forward(data).square().mean().backward();
    plain.step();
  }
  EXPECT_TRUE(same_bits(trained, clones_of(model->parameters())));
}

TEST_F(WrittenParameters, MayBeWrittenWithOneMicroBatchPerWindow) {
  Stepper stepper(model, optimizer, {.accumulate = {.every = 1}});
  EXPECT_TRUE(stepper.accumulate({data}, [this](const Batch& batch) { return loss_of(batch); })->stepped());
}

TEST_F(WrittenParameters, AreAnErrorThatNamesThemWhereForwardRunsSeveralTimes) {
  const auto refuses = [this](const StepperOptions& options) {
    Stepper stepper(model, optimizer, options);
    EXPECT_THAT([&] { step(stepper); }, ThrowsMessage<ConfigError>(HasSubstr("'linear.weight' was written")));
  };
  refuses({.micro_batch = 4});
  refuses({.budget = {.memory = Bytes::parse("64MiB")}});
}

TEST_F(WrittenParameters, AreAnErrorWhereMastersWouldOverwriteThem) {
  model->to(torch::kBFloat16);
  data = data.to(torch::kBFloat16);
  Stepper stepper(model, optimizer, {.precision = Precision::BFloat16, .weights = Weights::Low});
  EXPECT_THAT([&] { step(stepper); }, ThrowsMessage<ConfigError>(HasSubstr("'linear.weight' was written")));
}

TEST_F(WrittenParameters, AreAnErrorIfWrittenAfterForward) {
  Stepper stepper(model, optimizer);
  model->linear->bias.register_hook([this](const torch::Tensor&) {
    const torch::NoGradGuard no_grad;
    model->linear->bias.mul_(0.5);
  });
  EXPECT_THROW(step(stepper), ConfigError);
}

}  // namespace
}  // namespace snug::written_parameters_test
