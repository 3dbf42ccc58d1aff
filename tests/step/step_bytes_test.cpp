#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/stepper.h"
#include "src/core/optimizer_capabilities.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

// What an optimizer's step allocates is foretold; for optimizers that snug does not know it is found out.

namespace snug::step_bytes_test {
namespace {

namespace optim = torch::optim;
using testing::clones_of;
using testing::same_bits;
using torch::Tensor;
using Parameters = std::vector<Tensor>;
using Make = std::function<std::unique_ptr<optim::Optimizer>(const Parameters&)>;

constexpr int64_t kSmall = 64;  // numbers that operators make tensors of

template <class Optimizer, class Options>
Make make(Options options) {
  return [options](const Parameters& p) { return std::make_unique<Optimizer>(p, options); };
}

std::vector<Make> torchs() {
  std::vector<Make> all;
  for (const double decay : {0.0, 0.1}) {
    for (const bool option : {false, true}) {
      const double momentum = option ? 0.9 : 0.0;
      all.push_back(make<optim::Adam>(optim::AdamOptions(0.1).weight_decay(decay).amsgrad(option)));
      all.push_back(make<optim::AdamW>(optim::AdamWOptions(0.1).weight_decay(decay).amsgrad(option)));
      all.push_back(make<optim::RMSprop>(optim::RMSpropOptions(0.1).weight_decay(decay).centered(option)));
      all.push_back(make<optim::RMSprop>(optim::RMSpropOptions(0.1).weight_decay(decay).momentum(momentum)));
      all.push_back(make<optim::SGD>(optim::SGDOptions(0.1).weight_decay(decay).momentum(momentum)));
      all.push_back(make<optim::Adagrad>(optim::AdagradOptions(0.1).weight_decay(decay)));
    }
    all.push_back(make<optim::SGD>(optim::SGDOptions(0.1).weight_decay(decay).momentum(0.9).nesterov(true)));
  }
  return all;
}

TEST(OptimizerBytes, OfTorchsOptimizersAreWhatTheirStepsTake) {
  int number = 0;
  for (const Make& of : torchs()) {
    SCOPED_TRACE(number++);
    const Parameters parameters{torch::ones({1000, 100}).requires_grad_(), torch::ones({7}).requires_grad_()};
    const auto optimizer = of(parameters);
    EXPECT_TRUE(detail::knows_state_to_come(*optimizer));
    for (int step = 0; step < 3; ++step) {
      for (const Tensor& parameter : parameters) {
        parameter.mutable_grad() = torch::ones_like(parameter);
      }
      const int64_t state = detail::state_bytes_to_come(*optimizer), workspace = detail::workspace_bytes(*optimizer);
      const MemoryMeter meter;
      optimizer->step();
      EXPECT_EQ(meter.report().live_bytes, state);
      if (step > 0) {
        EXPECT_LE(meter.report().peak_bytes, workspace);
        EXPECT_GE(meter.report().peak_bytes, workspace - kSmall);
      } else {  // that of a later parameter may come beside the workspace of an earlier one, but both never are at once
        EXPECT_LE(meter.report().peak_bytes, state + workspace);
      }
    }
  }
}

// Hands gradients on, as a program does that has an optimizer for each of its tensors. Has torch's options all the
// same.
struct Several : optim::Optimizer {
  std::vector<std::unique_ptr<optim::Adam>> all;

  explicit Several(const Parameters& parameters) : Optimizer(parameters, std::make_unique<optim::AdamOptions>()) {
    for (const Tensor& parameter : parameters) {
      all.push_back(std::make_unique<optim::Adam>(Parameters{parameter}, 1e-3));
    }
  }
  Tensor step(LossClosure /*closure*/ = nullptr) override {
    for (auto& optimizer : all) {
      optimizer->step();
    }
    return {};
  }
};

struct SeveralWithState : Several, StatefulOptimizer {
  using Several::Several;
  StateDict state_dict() const override { return {}; }
  void load_state_dict(const StateDict& /*state*/) override {}
};

TEST(OptimizerBytes, StateThatAnotherOptimizerHasIsNotCountedAsToCome) {
  const Parameters parameters{torch::ones({100}).requires_grad_()};
  const Several several(parameters);
  EXPECT_EQ(detail::state_bytes_to_come(several), 0);
  EXPECT_FALSE(detail::knows_state_to_come(several));
  EXPECT_FALSE(detail::knows_state_to_come(SeveralWithState(parameters)));
  EXPECT_TRUE(detail::knows_state_to_come(AdamW(parameters)));
}

// Gradients fit, but not the state that the first update makes.
TEST(OptimizerBytes, AnUpdateThatMakesStateNobodyKnewOfIsNotLeftHalfMade) {
  const Batch batch{torch::ones({2, 256}), torch::ones({2, 256})};
  const auto train = [&](bool limited) {
    auto model = testing::make_mlp({256, 256, 256});
    Several optimizer(model->parameters());
    int64_t weights = 0;
    for (const Tensor& parameter : model->parameters()) {
      weights += static_cast<int64_t>(parameter.nbytes());
    }
    StepperOptions options;
    if (limited) {
      options.budget.memory = Bytes(live_bytes(torch::kCPU).count() + 14 * weights / 5);
    }
    Stepper stepper(model, optimizer, options);
    const auto loss_of = [&](const Batch& micro) { return testing::squared_error(model->forward(micro[0]), micro[1]); };
    EXPECT_TRUE(stepper.step(batch, loss_of).stepped());
    auto after = clones_of(model->parameters());
    if (limited) {
      EXPECT_THROW(stepper.step(batch, loss_of), BudgetExceeded) << "by now it is known";
      EXPECT_TRUE(same_bits(clones_of(model->parameters()), after));
    }
    return after;
  };
  EXPECT_TRUE(same_bits(train(true), train(false)));
}

}  // namespace
}  // namespace snug::step_bytes_test
