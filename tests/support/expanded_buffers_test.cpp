// What tests read and write of tensors, for buffers whose elements lie on the same memory.

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/support/planned_step.h"
#include "tests/support/random_model.h"
#include "tests/support/tensors.h"

namespace snug::expanded_buffers_test {
namespace {

using testing::bits_of;
using testing::RandomModel;
using testing::same_bits;
using torch::Tensor;

// The next number in memory belongs to no element of the buffer.
TEST(ExpandedBuffers, HaveTheBitsOfTheirElementsAndNotOfTheMemoryBehind) {
  const Tensor memory = torch::arange(1, 9, torch::kFloat), all_ones = memory.narrow(0, 0, 1).expand({8});
  EXPECT_EQ(bits_of({all_ones}), bits_of({torch::ones({8})}));
  EXPECT_NE(bits_of({all_ones}), bits_of({memory}));
  const Tensor rows = memory.narrow(0, 0, 2).expand({3, 2});
  EXPECT_EQ(bits_of({rows, memory}), bits_of({torch::tensor({1.f, 2.f, 1.f, 2.f, 1.f, 2.f}), memory}));
}

TEST(ExpandedBuffers, AreOverwrittenInTheirOwnMemoryAlone) {
  const Tensor memory = torch::arange(1, 9, torch::kFloat), rows = memory.narrow(0, 2, 2).expand({3, 2});
  const Tensor values = rows.clone();
  memory.zero_();
  testing::overwrite(rows, values);
  EXPECT_TRUE(same_bits(rows, values));
  EXPECT_TRUE(same_bits(memory, torch::tensor({0.f, 0.f, 3.f, 4.f, 0.f, 0.f, 0.f, 0.f})));
}

TEST(ExpandedBuffers, AreAsAtTheBeginningInEachPlannedStep) {
  auto module = std::make_shared<torch::nn::Module>();
  const Tensor buffer = module->register_buffer("buffer", torch::ones({1}).expand({16}));
  const RandomModel model{.description = "an expanded buffer",
                          .kinds = {},
                          .module = module,
                          .kept = std::make_shared<std::vector<Tensor>>(),
                          .input = torch::ones({16}, torch::requires_grad()),
                          .loss = [=](const Tensor& rows) {
                            const Tensor loss = (rows * buffer.clone()).square().sum();
                            const torch::NoGradGuard no_grad;
                            buffer.as_strided({1}, {1}).mul_(3);
                            return loss;
                          }};
  testing::Step step(model);
  const testing::Outcome first = step.run(std::nullopt), second = step.run(std::nullopt);
  EXPECT_TRUE(same_bits(first.buffers, {torch::full({16}, 3.f)}));
  testing::expect_same(first, second);
}

}  // namespace
}  // namespace snug::expanded_buffers_test
