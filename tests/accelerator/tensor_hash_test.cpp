// Hashes of tensors that are computed on their device.

#include "src/activations/tensor_hash.h"

#include <functional>
#include <set>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/accelerator/accelerator.h"

namespace snug::tensor_hash_test {
namespace {

using testing::accelerator;
using torch::Tensor;

uint64_t tensor_hash(const Tensor& tensor) {
  detail::TensorHashes hashes;
  hashes.add(tensor);
  return hashes.read().front();
}

constexpr int64_t kRows = 1501, kWidth = 1001;  // 5.7 MiB, and no whole number of words of 8 bytes

TEST(TensorHashOnAnAccelerator, IsOfTheValuesAlone) {
  const Tensor x = torch::randn({kRows, kWidth}, accelerator());
  const uint64_t hash = tensor_hash(x);
  EXPECT_EQ(tensor_hash(x.clone()), hash);
  const Tensor wide = torch::zeros({kRows * kWidth + 3}, accelerator());
  for (const int64_t offset : {1, 2, 3}) {
    const Tensor moved = wide.slice(0, offset, offset + x.numel());
    moved.copy_(x.flatten());
    EXPECT_EQ(tensor_hash(moved), hash) << "from element " << offset;
  }
}

TEST(TensorHashOnAnAccelerator, IsAnotherOneForOtherValuesInAnyPlaces) {
  const Tensor x = torch::randn({kRows, kWidth}, accelerator());
  std::set<uint64_t> hashes{tensor_hash(x)};
  const std::function<void(Tensor)> changes[] = {
      [](Tensor y) { y[0][0] += 1; },
      [](Tensor y) { y[kRows - 1][kWidth - 1] += 1; },
      [](Tensor y) { y.neg_(); },
      [](Tensor y) { y[3].neg_(); },
      [](Tensor y) { y[7].slice(0, 0, 2).neg_(); },
      [](Tensor y) { y.copy_(y.flip(0)); },
      [](Tensor y) { y.copy_(y.flip(1)); },
      [](Tensor y) { y.copy_(y.roll(2)); },
      [](Tensor y) { y.copy_(y.flatten().roll(1 << 19).view({kRows, kWidth})); },  // by one chunk
  };
  for (const auto& change : changes) {
    const Tensor y = x.clone();
    change(y);
    EXPECT_TRUE(hashes.insert(tensor_hash(y)).second);
  }
}

TEST(TensorHashOnAnAccelerator, TakesAnyLayout) {
  const Tensor x = torch::randn({kRows, kWidth}, accelerator());
  const std::function<Tensor(const Tensor&)> layouts[] = {
      [](const Tensor& y) { return y.t(); },
      [](const Tensor& y) { return y.slice(1, 1, kWidth); },
      [](const Tensor& y) { return y.unsqueeze(0).slice(2, 0, kWidth, 2); },
      [](const Tensor& y) { return y[1].slice(0, 0, 99, 7); },
      [](const Tensor& y) { return y[1][1]; },
      [](const Tensor& y) { return y.slice(0, 0, 3).t().unsqueeze(1).expand({kWidth, 800, 3}); },
  };
  for (const auto& layout : layouts) {
    EXPECT_EQ(tensor_hash(layout(x.clone())), tensor_hash(layout(x)));
    EXPECT_NE(tensor_hash(layout(x + 1)), tensor_hash(layout(x)));
  }
}

TEST(TensorHashOnAnAccelerator, OfManyTensorsIsReadAtOnce) {
  SNUG_SKIP_UNLESS_SIMULATED();
  const Tensor small = torch::randn({100, 5}, accelerator()), large = torch::randn({kRows, kWidth}, accelerator());
  std::vector<Tensor> tensors{large, large * 2, large.t()};
  for (int64_t i = 0; i < small.size(0); ++i) {
    tensors.push_back(small[i]);
  }
  std::vector<uint64_t> one_by_one;
  for (const Tensor& tensor : tensors) {
    one_by_one.push_back(tensor_hash(tensor));
  }
  const int64_t reads = sim_device::host_reads();
  const double waited = sim_device::host_seconds();
  detail::TensorHashes hashes;
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(hashes.add(tensors[i] * 1), i);
  }
  EXPECT_EQ(sim_device::host_seconds(), waited);
  EXPECT_EQ(hashes.read(), one_by_one);
  EXPECT_EQ(sim_device::host_reads(), reads);
}

TEST(TensorHashOnAnAccelerator, TakesLittleMemoryOfTheHostForManySmallTensors) {
  SNUG_SKIP_UNLESS_SIMULATED();
  const Tensor x = torch::ones({1 << 18}, accelerator());
  const double waited = sim_device::host_seconds();
  detail::TensorHashes hashes;
  for (int i = 0; i < 64; ++i) {
    hashes.add(x);
  }
  EXPECT_EQ(sim_device::host_seconds(), waited);
  hashes.add(x);
  EXPECT_GT(sim_device::host_seconds(), waited) << "64 MiB are on the host";
}

TEST(TensorHashOnAnAccelerator, TakesAnyType) {
  for (const auto type : {torch::kBool, torch::kHalf, torch::kDouble, torch::kComplexFloat, torch::kLong}) {
    const Tensor x = (torch::randn({(3 << 20) + 1}, accelerator()) * 100).clamp_min(0).to(type);
    EXPECT_EQ(tensor_hash(x), tensor_hash(x.clone())) << type;
    EXPECT_NE(tensor_hash(x), tensor_hash(x.flip(0))) << type;
    const Tensor last = x.clone();
    last[-1] = last[-1].logical_not();
    EXPECT_NE(tensor_hash(x), tensor_hash(last)) << type;
  }
}

}  // namespace
}  // namespace snug::tensor_hash_test
