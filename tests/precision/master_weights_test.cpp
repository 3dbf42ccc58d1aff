#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/precision.h"
#include "tests/support/tensors.h"

namespace snug::master_weights_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;

// A weight of 1 in BF16 does not move by steps of 1e-3, which are below half of its last place (1/256): "pure" training
// stands still.
TEST(MasterWeights, AddUpStepsThatAreTooSmallForTheWeightItself) {
  const auto train = [](bool with_masters) {
    const Tensor weight = torch::ones({4}, torch::kBFloat16).requires_grad_();
    MasterWeights masters({weight});
    torch::optim::SGD optimizer(with_masters ? masters.parameters() : std::vector{weight}, 1e-3);
    for (int i = 0; i < 100; ++i) {
      weight.sum().backward();
      if (with_masters) {
        masters.gather_gradients();
      }
      optimizer.step();
      if (with_masters) {
        masters.scatter();
      }
      optimizer.zero_grad();
    }
    return weight.detach().to(torch::kFloat);
  };
  EXPECT_TRUE(same_bits(train(false), torch::ones({4})));
  EXPECT_LT((train(true) - 0.9).abs().max().item<double>(), 0.9 / 512);
}

// 2048 + 1 is 2048 in FP16: summed there, all but the first of these gradients would be lost.
TEST(MasterWeights, SumGradientsOfMicroBatchesInFp32) {
  const Tensor weight = torch::zeros({}, torch::kHalf).requires_grad_();
  MasterWeights masters({weight});
  (weight * 2048).backward();
  masters.gather_gradients();
  EXPECT_FALSE(weight.grad().defined());
  for (int i = 0; i < 100; ++i) {
    weight.sum().backward();
    masters.gather_gradients();
  }
  EXPECT_EQ(masters.parameters()[0].grad().item<float>(), 2148.0f);
}

TEST(MasterWeights, OfFp32AndFp64ParametersAreThemselves) {
  const Tensor single = torch::ones({2}, torch::requires_grad());
  const Tensor half = torch::ones({2}, torch::kHalf).requires_grad_();
  MasterWeights masters({single, half, single});
  ASSERT_EQ(masters.parameters().size(), 2u) << "a tensor given twice counts once";
  EXPECT_TRUE(masters.parameters()[0].is_same(single));
  single.sum().backward();
  masters.gather_gradients();
  EXPECT_TRUE(single.grad().defined());
  {
    const torch::NoGradGuard no_grad;
    masters.parameters()[1].fill_(1.0009765625f / 1.5f);
  }
  masters.scatter();
  EXPECT_EQ(half[0].item<float>(), at::Half(1.0009765625f / 1.5f));
}

TEST(MasterWeights, PassOnWhatIsNotFinite) {
  const Tensor weight = torch::ones({2}, torch::kHalf).requires_grad_();
  MasterWeights masters({weight});
  ((weight * 60000) * 2).sum().backward();
  masters.gather_gradients();
  EXPECT_TRUE(masters.parameters()[0].grad().isinf().all().item<bool>());
}

TEST(MasterWeights, RefuseWhatCannotBeTrained) {
  EXPECT_THAT(error_of<ConfigError>([] { MasterWeights(std::vector<Tensor>{}); }), HasSubstr("no parameters"));
  EXPECT_THAT(error_of<ConfigError>([] { MasterWeights({torch::ones({2}), torch::ones({2}, torch::kInt)}); }),
              HasSubstr("parameter 1 is Int"));
}

// As of an embedding with sparse = true. 256 + 1 in BF16 is 256: repeated rows must be summed in FP32.
TEST(MasterWeights, GatherSparseGradientsInFp32AlsoNextToDenseOnes) {
  const Tensor rows = torch::tensor({{1, 1, 2}}, torch::kLong);
  const Tensor sparse = torch::sparse_coo_tensor(rows, torch::tensor({256.0, 1.0, 4.0}, torch::kBFloat16), {4});
  const Tensor dense = torch::full({4}, 0.5, torch::kBFloat16);
  const Tensor once = torch::tensor({0.0f, 257.0f, 4.0f, 0.0f});
  const auto gathered = [](const std::vector<Tensor>& gradients) {
    const Tensor weight = torch::zeros({4}, torch::kBFloat16).requires_grad_();
    MasterWeights masters({weight});
    for (const Tensor& gradient : gradients) {
      weight.mutable_grad() = gradient.clone();
      masters.gather_gradients();
    }
    const Tensor sum = masters.parameters()[0].grad();
    EXPECT_TRUE(!sum.is_sparse() || sum.is_coalesced());
    return sum;
  };
  EXPECT_TRUE(gathered({sparse}).is_sparse());
  EXPECT_TRUE(same_bits(gathered({sparse}).to_dense(), once));
  EXPECT_TRUE(same_bits(gathered({sparse, sparse}).to_dense(), once * 2));
  EXPECT_TRUE(same_bits(gathered({sparse, dense}), once + 0.5));
  EXPECT_TRUE(same_bits(gathered({dense, sparse}), once + 0.5));
}

}  // namespace
}  // namespace snug::master_weights_test
