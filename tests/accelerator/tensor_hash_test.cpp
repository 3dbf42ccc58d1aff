// Hashes of tensors that are computed on their device.

#include "src/activations/tensor_hash.h"

#include <functional>
#include <set>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/accelerator/accelerator.h"

namespace snug::tensor_hash_test {
namespace {

using detail::tensor_hash;
using testing::accelerator;
using torch::Tensor;

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
  const uint64_t hash = tensor_hash(x.t());
  EXPECT_EQ(tensor_hash(x.clone().t()), hash);
  EXPECT_NE(tensor_hash((x + 1).t()), hash);
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
