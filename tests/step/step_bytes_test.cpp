#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/memory.h"
#include "src/core/optimizer_capabilities.h"

// What an optimizer's step allocates is foretold; for optimizers that snug does not know it is found out.

namespace snug::step_bytes_test {
namespace {

namespace optim = torch::optim;
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

}  // namespace
}  // namespace snug::step_bytes_test
