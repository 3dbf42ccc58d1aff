// Micro-batches on their way to an accelerator while it computes.

#include <stdexcept>
#include <vector>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/loader.h"
#include "snug/stepper.h"
#include "tests/accelerator/accelerator.h"
#include "tests/support/tensors.h"

namespace snug::copy_ahead_test {
namespace {

using sim_device::LazyStreams;
using testing::accelerator;
using testing::same_bits;
using torch::Tensor;

constexpr int64_t kMicroBatches = 4, kItems = 1 << 12;

// One weight for each of an item's numbers.
struct Weights : torch::nn::Module {
  Tensor weight = register_parameter("weight", torch::linspace(-1, 1, kItems).to(accelerator()));

  Loss loss(const Batch& batch) {
    Tensor y = batch[0] * weight;
    for (int layer = 0; layer < 4; ++layer) {
      y = (y * 1.25).sin();
    }
    return Loss::sum(y.sum(), batch.size());
  }
};

Batch host_batch(bool pinned) {
  const Tensor values = torch::linspace(-2, 2, kMicroBatches * kItems).reshape({kMicroBatches, kItems});
  return Batch({pinned ? values.pin_memory() : values});
}

struct Made {
  double loss;
  Tensor weight;
  double seconds;  // on the virtual clock
};

Made step_on(const Batch& batch) {
  Weights model;
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  Stepper stepper(model, optimizer, {.micro_batch = 1});
  const double began = sim_device::virtual_seconds();
  const StepResult result = stepper.step(batch, [&](const Batch& micro) { return model.loss(micro); });
  const double seconds = sim_device::virtual_seconds() - began;
  return {result.loss(), model.weight.detach().cpu(), seconds};
}

// Only the first one's copy, of which nothing is known before the step, takes time of its own.
TEST(CopyAhead, RunsBesideWhatIsComputedAndBringsTheSameBits) {
  if (!sim_device::is_present()) {
    GTEST_SKIP() << "only the simulated accelerator has a clock of its own";
  }
  const Made there = step_on(host_batch(false).to(accelerator()));
  const LazyStreams lazy;
  for (const bool pinned : {false, true}) {
    const Made copied = step_on(host_batch(pinned));
    EXPECT_EQ(copied.loss, there.loss);
    EXPECT_TRUE(same_bits(copied.weight, there.weight));
    EXPECT_EQ(copied.seconds - there.seconds, kItems * sizeof(float) / sim_device::kBytesPerSecond);
  }
}

TEST(CopyAhead, LeavesMemoryAloneThatAFailedStepHasLetGoOf) {
  const LazyStreams lazy;
  Weights model;
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  Stepper stepper(model, optimizer, {.micro_batch = 1});
  const auto fail = [](const Batch&) -> Loss { throw std::runtime_error("for the test"); };
  EXPECT_THROW(stepper.step(host_batch(true), fail), std::runtime_error);
  const std::vector<Tensor> next{torch::full({1, kItems}, 5.0f, accelerator()),
                                 torch::full({1, kItems}, 5.0f, accelerator())};
  c10::impl::VirtualGuardImpl(accelerator().type()).synchronizeDevice(0);
  for (const Tensor& one : next) {
    EXPECT_TRUE(same_bits(one.cpu(), torch::full({1, kItems}, 5.0f)));
  }
}

// The training thread allocates no page-locked memory for such a batch, so the thread copies nothing on the host.
TEST(CopyAhead, TakesBatchesOfALoaderFromPageLockedMemoryAsTheyAre) {
  if (!sim_device::is_present()) {
    GTEST_SKIP() << "only the simulated accelerator counts allocations";
  }
  const Tensor values = host_batch(false)[0];
  const Made plain = step_on(Batch({values}));
  for (const int workers : {0, 2}) {
    Loader loader(ItemSource::of_tensors({values}),
                  {.batch = kMicroBatches, .shuffle = false, .workers = workers, .ahead = 1, .pin_memory = true});
    const Batch batch(*loader.next());
    loader.wait();  // no worker allocates during the step
    EXPECT_TRUE(batch[0].is_pinned());
    (void)sim_device::fail_pinned_after(1);
    const Made pinned = step_on(batch);
    EXPECT_EQ(sim_device::fail_pinned_after(0), 1) << "the step allocated page-locked memory";
    EXPECT_EQ(pinned.loss, plain.loss);
    EXPECT_TRUE(same_bits(pinned.weight, plain.weight));
  }
}

}  // namespace
}  // namespace snug::copy_ahead_test
