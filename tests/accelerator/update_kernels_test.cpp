// snug's own kernels of AdamW on a device: the bits of the CPU, without waiting and without memory.

#include <cstdint>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/memory.h"
#include "src/kernels/update_table.h"
#include "src/optim/adamw_update.h"
#include "tests/accelerator/accelerator.h"
#include "tests/kernels/one_lane_update.h"
#include "tests/support/sim_device/sim_stream.h"
#include "tests/support/tensors.h"

namespace snug::update_kernels_on_accelerator_test {
namespace {

using testing::accelerator;
using testing::same_bits;
using torch::Tensor;

int launches = 0;

void launch(const kernels::UpdateTable& table, c10::Stream stream) {
  ++launches;
  sim_device::enqueue(stream, sim_device::kOperatorSeconds, [table] { kernels::update_by_one_lane(table); });
}

/// While it lives, the simulated accelerator has the functions of CUDA's kernels, run by the CPU. CUDA has the kernels.
class [[nodiscard]] WithUpdateKernels {
 public:
  WithUpdateKernels() {
    launches = 0;
    detail::set_update_launcher(&launch);
  }
  ~WithUpdateKernels() { detail::set_update_launcher(nullptr); }
  WithUpdateKernels(const WithUpdateKernels&) = delete;
  WithUpdateKernels& operator=(const WithUpdateKernels&) = delete;
};

#define SNUG_SKIP_WITHOUT_UPDATE_KERNELS()                   \
  if (!detail::has_device_update(accelerator())) {           \
    GTEST_SKIP() << "this build is without SNUG_CUDA_ADAMW"; \
  }                                                          \
  static_assert(true)

struct Kind {
  torch::ScalarType dtype;
  AdamWOptions options;
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all{{torch::kFloat, {.lr = 0.01, .weight_decay = 0.1}},
                                     {torch::kHalf, {.lr = 0.01, .master_weights = true}},
                                     {torch::kBFloat16, {.lr = 0.01, .master_weights = true}},
                                     {torch::kBFloat16, {.lr = 0.01, .stochastic_rounding = true}}};
  return all;
}

/// More tensors than one launch takes, of all sizes up to more than a chunk, one of them without elements. In FP32 the
/// sizes are multiples of 16: LibTorch's kernel on the CPU rounds the rest of a vector otherwise.
std::vector<Tensor> parameters_on(c10::Device device, torch::ScalarType dtype) {
  torch::manual_seed(1);
  std::vector<Tensor> parameters;
  for (int64_t i = 0; i < kernels::UpdateTable::kMostTensors + 3; ++i) {
    const int64_t size = i == 2 ? 2 * kernels::UpdateTable::kChunk + 17 : i;
    const int64_t count = dtype == torch::kFloat ? size / 16 * 16 : size;
    parameters.push_back(torch::randn({count}).to(dtype).to(device).requires_grad_());
  }
  return parameters;
}

void set_gradients(const std::vector<Tensor>& parameters, uint64_t seed, double scale = 1) {
  torch::manual_seed(seed);
  for (const Tensor& parameter : parameters) {
    const Tensor gradient = torch::randn(parameter.sizes()) * scale;
    parameter.mutable_grad() = gradient.to(parameter.scalar_type()).to(parameter.device());
  }
}

void expect_same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(same_bits(a[i].detach().cpu(), b[i].detach().cpu())) << "tensor " << i;
  }
}

std::vector<Tensor> gradients_of(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> gradients;
  for (const Tensor& parameter : parameters) {
    gradients.push_back(parameter.grad());
  }
  return gradients;
}

/// Steps on the CPU and on the device, the third of them skipped for an overflow, and with gradients multiplied by 8.
class Pair {
 public:
  explicit Pair(const Kind& kind)
      : here_(parameters_on(torch::kCPU, kind.dtype)),
        there_(parameters_on(accelerator(), kind.dtype)),
        mine_(here_, kind.options),
        theirs_(there_, kind.options) {}

  void step(uint64_t number, bool has_overflow) {
    set_gradients(here_, number, 8);
    set_gradients(there_, number, 8);
    const Tensor scale = torch::full({}, 8.0f), found = torch::full({}, has_overflow ? 1.0f : 0.0f);
    mine_.set_gradient_scaling(scale, found);
    theirs_.set_gradient_scaling(scale.to(accelerator()), found.to(accelerator()));
    mine_.step();
    const int64_t reads = sim_device::host_reads();
    theirs_.step();
    EXPECT_EQ(sim_device::host_reads(), reads);
  }
  void compare() const {
    expect_same(there_, here_);
    expect_same(theirs_.state_tensors(), mine_.state_tensors());
    expect_same(gradients_of(there_), gradients_of(here_));
  }

 private:
  std::vector<Tensor> here_, there_;
  AdamW mine_, theirs_;
};

TEST(UpdateKernelsOnAccelerator, HaveTheBitsOfTheCpuAndNeverWait) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(c10::toString(kind.dtype));
    const WithUpdateKernels kernels;
    SNUG_SKIP_WITHOUT_UPDATE_KERNELS();
    Pair pair(kind);
    for (uint64_t number = 1; number <= 5; ++number) {
      pair.step(number, number == 3);
    }
    pair.compare();
    if (sim_device::is_present()) {
      EXPECT_EQ(launches, 2 * 5);
    }
  }
}

TEST(UpdateKernelsOnAccelerator, RunInTheOrderOfTheirStream) {
  SNUG_SKIP_UNLESS_SIMULATED();
  const WithUpdateKernels kernels;
  SNUG_SKIP_WITHOUT_UPDATE_KERNELS();
  Pair pair(kinds().back());
  {
    const sim_device::LazyStreams lazy;
    pair.step(1, false);
    pair.step(2, false);
  }
  pair.compare();
}

TEST(UpdateKernelsOnAccelerator, TakeNoMemoryButCountsOfSteps) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(c10::toString(kind.dtype));
    const WithUpdateKernels kernels;
    SNUG_SKIP_WITHOUT_UPDATE_KERNELS();
    const auto parameters = parameters_on(accelerator(), kind.dtype);
    AdamW optimizer(parameters, kind.options);
    set_gradients(parameters, 1);
    optimizer.step();
    set_gradients(parameters, 2);
    const int64_t workspace = optimizer.workspace_bytes();
    const MemoryMeter meter(accelerator());
    optimizer.step();
    EXPECT_LE(meter.report().peak_bytes, kind.dtype == torch::kFloat ? int64_t{512} * 60 : workspace);
    EXPECT_LE(workspace, int64_t{2 * 512} * 60);
  }
}

}  // namespace
}  // namespace snug::update_kernels_on_accelerator_test
