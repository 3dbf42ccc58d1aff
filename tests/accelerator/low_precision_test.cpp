// AdamW for 16-bit parameters on an accelerator: some elements at a time, in a workspace that a plan knows of.

#include <cstdint>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/memory.h"
#include "tests/accelerator/accelerator.h"
#include "tests/support/tensors.h"

namespace snug::low_precision_on_accelerator_test {
namespace {

using testing::accelerator;
using testing::same_bits;
using torch::Tensor;

constexpr int64_t kAtOnce = 4 << 20;

// More than an update takes at once, in one tensor and with small ones around it.
std::vector<Tensor> low_parameters() {
  std::vector<Tensor> parameters;
  for (const int64_t size : {int64_t{3}, kAtOnce + 1001, int64_t{130}}) {
    parameters.push_back(torch::randn({size}).to(torch::kBFloat16).to(accelerator()).requires_grad_());
  }
  return parameters;
}

void set_gradients_there(const std::vector<Tensor>& parameters, uint64_t seed) {
  torch::manual_seed(seed);
  for (const Tensor& parameter : parameters) {
    parameter.mutable_grad() = torch::randn(parameter.sizes()).to(torch::kBFloat16).to(accelerator());
  }
}

std::vector<AdamWOptions> both() {
  return {{.lr = 0.01, .master_weights = true}, {.lr = 0.01, .stochastic_rounding = true}};
}

TEST(LowPrecisionOnAccelerator, AnUpdateTakesNoMoreThanItSays) {
  for (const AdamWOptions& options : both()) {
    SCOPED_TRACE(options.master_weights);
    torch::manual_seed(1);
    const auto parameters = low_parameters();
    AdamW optimizer(parameters, options);
    for (uint64_t step = 1; step <= 2; ++step) {
      set_gradients_there(parameters, step);
      const int64_t state = optimizer.state_bytes_to_come(), workspace = optimizer.workspace_bytes();
      const MemoryMeter meter(accelerator());
      optimizer.step();
      EXPECT_EQ(meter.report().live_bytes, state);
      EXPECT_LE(meter.report().peak_bytes, state + workspace);
      EXPECT_GT(meter.report().peak_bytes, state + workspace - (1 << 20));
    }
  }
}

TEST(LowPrecisionOnAccelerator, TheWorkspaceIsBoundedWhateverTheModelsSize) {
  SNUG_SKIP_UNLESS_SIMULATED();  // CUDA's kernels take none
  for (const AdamWOptions& options : both()) {
    const Tensor large = torch::empty({16 * kAtOnce}, torch::TensorOptions(accelerator()).dtype(torch::kBFloat16));
    AdamW optimizer({large.requires_grad_()}, options);
    EXPECT_LT(optimizer.workspace_bytes(), (options.master_weights ? 17 : 69) << 20);
    EXPECT_GT(optimizer.workspace_bytes(), 16 << 20);
  }
}

TEST(LowPrecisionOnAccelerator, MastersAreThoseOfTheFp32Optimizer) {
  torch::manual_seed(1);
  const auto low = low_parameters();
  std::vector<Tensor> full;
  for (const Tensor& parameter : low) {
    full.push_back(parameter.detach().to(torch::kFloat).requires_grad_());
  }
  AdamW mine(low, {.lr = 0.01, .master_weights = true}), reference(full, {.lr = 0.01});
  for (uint64_t step = 1; step <= 2; ++step) {
    set_gradients_there(low, step);
    for (size_t i = 0; i < low.size(); ++i) {
      full[i].mutable_grad() = low[i].grad().to(torch::kFloat);
    }
    mine.step();
    reference.step();
  }
  for (size_t i = 0; i < low.size(); ++i) {
    EXPECT_TRUE(same_bits(low[i].detach().cpu(), full[i].detach().to(torch::kBFloat16).cpu())) << i;
  }
}

// The numbers belong to elements, so those of a parameter that is updated by itself, and cut elsewhere, are the same.
TEST(LowPrecisionOnAccelerator, RandomNumbersAreThoseOfTheElementsHoweverTheyAreTaken) {
  torch::manual_seed(1);
  const auto together = low_parameters();
  std::vector<Tensor> alone;
  for (const Tensor& parameter : together) {
    alone.push_back(parameter.detach().clone().requires_grad_());
  }
  const AdamWOptions options{.lr = 0.01, .stochastic_rounding = true};
  AdamW one(together, options);
  set_gradients_there(together, 1);
  for (size_t i = 0; i < alone.size(); ++i) {
    alone[i].mutable_grad() = together[i].grad().clone();
  }
  one.step();
  uint64_t first = 0;
  for (size_t i = 0; i < alone.size(); ++i) {
    AdamW own({alone[i]}, options);
    own.number_elements({first});
    own.step();
    first += static_cast<uint64_t>(alone[i].numel());
    EXPECT_TRUE(same_bits(alone[i].detach().cpu(), together[i].detach().cpu())) << i;
  }
}

}  // namespace
}  // namespace snug::low_precision_on_accelerator_test
