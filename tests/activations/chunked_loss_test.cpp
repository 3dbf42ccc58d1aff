#include "snug/chunked_loss.h"

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/autocast.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "tests/support/tensors.h"

namespace snug::chunked_loss_test {
namespace {

using ::testing::AllOf;
using testing::close_in_norm;
using testing::error_of;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;

struct Head {
  static constexpr int64_t kRows = 53, kWidth = 24, kVocabulary = 37;

  Tensor hidden, weight, bias, target;

  explicit Head(c10::ScalarType dtype = torch::kFloat) {
    torch::manual_seed(4);
    hidden = torch::randn({kRows, kWidth}).to(dtype).requires_grad_();
    weight = torch::randn({kVocabulary, kWidth}).to(dtype).requires_grad_();
    bias = torch::randn({kVocabulary}).to(dtype).requires_grad_();
    target = torch::randint(kVocabulary, {kRows}, torch::kLong);
  }
  std::vector<Tensor> gradients(const Tensor& loss) {
    for (Tensor* tensor : {&hidden, &weight, &bias}) {
      tensor->mutable_grad().reset();
    }
    loss.backward();
    return {hidden.grad(), weight.grad(), bias.grad()};
  }
  Tensor plain(const ChunkedLossOptions& o) const {
    return at::cross_entropy_loss(at::linear(hidden, weight, o.bias.defined() ? std::optional(o.bias) : std::nullopt),
                                  target, {}, o.reduction == Reduction::Sum ? at::Reduction::Sum : at::Reduction::Mean,
                                  o.ignore_index, o.label_smoothing);
  }
  Tensor chunked(const ChunkedLossOptions& o) const { return chunked_cross_entropy(hidden, weight, target, o); }
};

constexpr double kEps = std::numeric_limits<float>::epsilon() / 2;

// Chunked and plain may sum in another order: a logit's kWidth terms, the rows of the loss and of the weight's
// gradient. Two orders of a sum of n terms differ by at most 2 n eps times the sum of magnitudes (Higham 2002, section
// 4.2). For a logit that sum is below 40 here (asserted), so logits differ by d <= 2 kWidth 40 eps; a row's loss by 2
// d, its softmax by 2 d in the 1-norm. Losses are above 1 and the 1-norm of softmax minus one-hot near 2, so the
// relative error is at most 2 d, and 2 kRows eps for the sums over rows.
constexpr double kLargestLogitSum = 40;
constexpr double kBound = (4 * Head::kWidth * kLargestLogitSum + 2 * Head::kRows) * kEps;

TEST(ChunkedCrossEntropy, TheBoundOfTheseTestsHoldsForTheirData) {
  const Head head;
  EXPECT_LT(torch::matmul(head.hidden.abs(), head.weight.abs().t()).max().item<double>(), kLargestLogitSum);
}

void expect_equal_to_plain(const ChunkedLossOptions& options) {
  Head head;
  const Tensor expected = head.plain(options);
  const auto expected_gradients = head.gradients(expected);
  const Tensor loss = head.chunked(options);
  EXPECT_TRUE(close_in_norm(loss, expected, kBound));
  const auto gradients = head.gradients(loss);
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (expected_gradients[i].defined()) {
      EXPECT_TRUE(close_in_norm(gradients[i], expected_gradients[i], kBound)) << i;
    } else {
      EXPECT_FALSE(gradients[i].defined()) << i;
    }
  }
}

TEST(ChunkedCrossEntropy, EqualsThePlainOneForAnySizeOfChunk) {
  for (const int64_t chunk : {1, 7, 52, 53, 54, 4096}) {
    SCOPED_TRACE(chunk);
    expect_equal_to_plain({.chunk = chunk});
    expect_equal_to_plain({.chunk = chunk, .reduction = Reduction::Mean});
  }
}

// In FP64 the bound is 2^29 times as sharp, so a wrong formula cannot hide behind rounding.
TEST(ChunkedCrossEntropy, EqualsThePlainOneInDoublePrecisionToTwelveDigits) {
  Head head(torch::kDouble);
  for (const auto& options : {ChunkedLossOptions{.chunk = 10},
                              {.chunk = 10, .reduction = Reduction::Mean, .ignore_index = 3},
                              {.chunk = 10, .ignore_index = 3, .label_smoothing = 0.1, .bias = head.bias}}) {
    const Tensor expected = head.plain(options);
    const auto expected_gradients = head.gradients(expected);
    const Tensor loss = head.chunked(options);
    EXPECT_EQ(loss.scalar_type(), torch::kDouble);
    EXPECT_TRUE(close_in_norm(loss, expected, 1e-12));
    const auto gradients = head.gradients(loss);
    EXPECT_TRUE(close_in_norm(gradients[0], expected_gradients[0], 1e-12));
    EXPECT_TRUE(close_in_norm(gradients[1], expected_gradients[1], 1e-12));
    if (options.bias.defined()) {
      EXPECT_TRUE(close_in_norm(gradients[2], expected_gradients[2], 1e-12));
    }
  }
}

TEST(ChunkedCrossEntropy, TakesAnyVocabularyWithEveryOptionAtOnce) {
  for (const int64_t vocabulary : {1, 2, 3, 1000, 50257}) {
    SCOPED_TRACE(vocabulary);
    Head head(torch::kDouble);
    head.weight = torch::randn({vocabulary, Head::kWidth}, torch::kDouble).requires_grad_();
    head.bias = torch::randn({vocabulary}, torch::kDouble).requires_grad_();
    head.target = torch::randint(vocabulary, {Head::kRows}, torch::kLong);
    head.target.slice(0, 5, 20).fill_(-1);
    for (const auto reduction : {Reduction::Sum, Reduction::Mean}) {
      const ChunkedLossOptions options{
          .chunk = 20, .reduction = reduction, .ignore_index = -1, .label_smoothing = 0.2, .bias = head.bias};
      const Tensor expected = head.plain(options);
      const auto expected_gradients = head.gradients(expected);
      const Tensor loss = head.chunked(options);
      EXPECT_TRUE(close_in_norm(loss, expected, 1e-12));
      const auto gradients = head.gradients(loss);
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_TRUE(close_in_norm(gradients[i], expected_gradients[i], 1e-12)) << i;
      }
    }
  }
}

TEST(ChunkedCrossEntropy, RefusesATargetOutsideOfTheVocabulary) {
  Head head;
  head.target[30] = Head::kVocabulary;
  EXPECT_THROW(head.chunked({.chunk = 8}), c10::Error);
}

TEST(ChunkedCrossEntropy, WithOneChunkIsThePlainOneToTheBit) {
  Head head;
  const ChunkedLossOptions options{.chunk = Head::kRows};
  const Tensor expected = head.plain(options);
  const auto expected_gradients = head.gradients(expected);
  const Tensor loss = head.chunked(options);
  EXPECT_TRUE(same_bits(loss, expected));
  EXPECT_TRUE(same_bits(head.gradients(loss), expected_gradients));
}

TEST(ChunkedCrossEntropy, OfOneRowAtATimeIsTheSumOfTheRowsLosses) {
  const Head head;
  const torch::NoGradGuard no_grad;
  Tensor sum = torch::zeros({});
  for (int64_t i = 0; i < Head::kRows; ++i) {
    const auto row = [&](const Tensor& t) { return t.slice(0, i, i + 1); };
    const Tensor loss = chunked_cross_entropy(row(head.hidden), head.weight, row(head.target));
    const Tensor logits = torch::matmul(row(head.hidden), head.weight.t()).flatten();
    EXPECT_TRUE(close_in_norm(loss, -torch::log_softmax(logits, 0)[head.target[i].item<int64_t>()], kBound)) << i;
    sum = sum + loss;
  }
  EXPECT_TRUE(same_bits(head.chunked({.chunk = 1}), sum));
}

TEST(ChunkedCrossEntropy, LeavesIgnoredTargetsOutOfTheSumAndOfTheDivisor) {
  Head head;
  head.target.slice(0, 0, 20).fill_(-100);
  for (const auto reduction : {Reduction::Sum, Reduction::Mean}) {
    const ChunkedLossOptions options{.chunk = 8, .reduction = reduction};
    EXPECT_TRUE(close_in_norm(head.chunked(options), head.plain(options), kBound));
    const auto gradients = head.gradients(head.chunked(options));
    EXPECT_EQ(gradients[0].slice(0, 0, 20).abs().max().item<float>(), 0) << "ignored rows have no gradient";
    EXPECT_GT(gradients[0].slice(0, 20).abs().min().item<float>(), 0);
  }
  expect_equal_to_plain({.chunk = 8, .ignore_index = 5});
  expect_equal_to_plain({.chunk = 8, .reduction = Reduction::Mean, .ignore_index = 5});
}

TEST(ChunkedCrossEntropy, OfIgnoredTargetsOnlyIsZeroAsSumAndNanAsMean) {
  Head head;
  head.target.fill_(-100);
  EXPECT_EQ(head.chunked({.chunk = 8}).item<float>(), 0);
  EXPECT_TRUE(std::isnan(head.chunked({.chunk = 8, .reduction = Reduction::Mean}).item<float>())) << "as torch's";
  EXPECT_TRUE(std::isnan(head.plain({.reduction = Reduction::Mean}).item<float>()));
}

TEST(ChunkedCrossEntropy, SmoothsLabelsAsThePlainOne) {
  expect_equal_to_plain({.chunk = 8, .label_smoothing = 0.1});
  expect_equal_to_plain({.chunk = 8, .reduction = Reduction::Mean, .ignore_index = 5, .label_smoothing = 0.3});
}

TEST(ChunkedCrossEntropy, AddsABiasAndTrainsIt) {
  Head head;
  const ChunkedLossOptions options{.chunk = 8, .bias = head.bias};
  const auto expected = head.gradients(head.plain(options));
  const auto gradients = head.gradients(head.chunked(options));
  ASSERT_TRUE(gradients[2].defined());
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(close_in_norm(gradients[i], expected[i], kBound)) << i;
  }
}

TEST(ChunkedCrossEntropy, TakesAnyNumberOfLeadingSizes) {
  const Head head;
  const torch::NoGradGuard no_grad;
  const Tensor hidden = head.hidden.slice(0, 0, 48);
  const Tensor target = head.target.slice(0, 0, 48);
  const Tensor expected = chunked_cross_entropy(hidden, head.weight, target, {.chunk = 10});
  EXPECT_TRUE(same_bits(
      chunked_cross_entropy(hidden.view({2, 3, 8, 24}), head.weight, target.view({2, 3, 8}), {.chunk = 10}), expected));
  EXPECT_EQ(expected.dim(), 0);
  const Tensor single = chunked_cross_entropy(hidden[0], head.weight, target[0]);
  EXPECT_TRUE(same_bits(single, chunked_cross_entropy(hidden.slice(0, 0, 1), head.weight, target.slice(0, 0, 1))));
}

TEST(ChunkedCrossEntropy, OfNoRowsIsZero) {
  const Head head;
  const Tensor loss = chunked_cross_entropy(head.hidden.slice(0, 0, 0), head.weight, head.target.slice(0, 0, 0));
  EXPECT_EQ(loss.item<float>(), 0);
}

TEST(ChunkedCrossEntropy, UnderAutocastComputesLogitsInBFloat16AndTheLossInFloat) {
  Head head;
  const auto loss_of = [&](const auto& compute) {
    const Autocast autocast(torch::kCPU, torch::kBFloat16);
    return compute();
  };
  const Tensor expected = loss_of([&] {
    const Tensor logits = at::linear(head.hidden, head.weight);
    EXPECT_EQ(logits.scalar_type(), torch::kBFloat16);
    return at::cross_entropy_loss(logits.to(torch::kFloat), head.target, {}, at::Reduction::Sum);
  });
  const auto expected_gradients = head.gradients(expected);
  const Tensor loss = loss_of([&] { return head.chunked({.chunk = Head::kRows}); });
  EXPECT_EQ(loss.scalar_type(), torch::kFloat);
  EXPECT_TRUE(same_bits(loss, expected));
  EXPECT_TRUE(same_bits(head.gradients(loss), expected_gradients));
}

// Plain: logits, their log-softmax, and in backward the gradient of logits. Chunked: the same for one chunk of 16 rows
// out of 1,024.
TEST(ChunkedCrossEntropy, NeverHoldsTheMatrixOfLogits) {
  constexpr int64_t kRows = 1024, kWidth = 8, kVocabulary = 500, kChunk = 16;
  constexpr int64_t kLogits = kRows * kVocabulary * 4;
  const Tensor hidden = torch::randn({kRows, kWidth}).requires_grad_();
  const Tensor weight = torch::randn({kVocabulary, kWidth}).requires_grad_();
  const Tensor target = torch::randint(kVocabulary, {kRows}, torch::kLong);
  const auto peak = [&](bool chunked) {
    hidden.mutable_grad().reset();
    weight.mutable_grad().reset();
    const MemoryMeter meter;
    const Tensor loss = chunked ? chunked_cross_entropy(hidden, weight, target, {.chunk = kChunk})
                                : at::cross_entropy_loss(at::linear(hidden, weight), target, {}, at::Reduction::Sum);
    loss.backward();
    return meter.report().peak_bytes;
  };
  EXPECT_GE(peak(false), 2 * kLogits);
  // What remains: gradients of hidden (also in chunks until they are joined) and weight (twice while one is added), and
  // of a chunk at most four matrices.
  const int64_t hidden_bytes = kRows * kWidth * 4;
  const int64_t weight_bytes = kVocabulary * kWidth * 4;
  const int64_t chunk_of_logits = kLogits * kChunk / kRows;
  EXPECT_LE(peak(true), 2 * hidden_bytes + 2 * weight_bytes + 4 * chunk_of_logits + 4096);
  EXPECT_LT(peak(true), kLogits / 4);
}

TEST(ChunkedCrossEntropy, RefusesShapesThatDoNotFitAndNamesThem) {
  const Head head;
  const auto message = [&](const Tensor& hidden, const Tensor& weight, const Tensor& target,
                           const ChunkedLossOptions& options = {}) {
    return error_of<ConfigError>([&] { chunked_cross_entropy(hidden, weight, target, options); });
  };
  const Tensor narrow = head.hidden.slice(1, 0, 5);
  EXPECT_THAT(message(narrow, head.weight, head.target),
              AllOf(HasSubstr("hidden [53, 5]"), HasSubstr("weight [37, 24]")));
  EXPECT_THAT(message(head.hidden, head.weight.flatten(), head.target), HasSubstr("weight [888]"));
  EXPECT_THAT(message(head.hidden, head.weight, head.target.slice(0, 1)), HasSubstr("target is Long [52]"));
  EXPECT_THAT(message(head.hidden, head.weight, head.target.to(torch::kInt)), HasSubstr("target is Int [53]"));
  EXPECT_THAT(message(head.hidden, head.weight, head.target, {.bias = torch::zeros({24})}),
              AllOf(HasSubstr("bias is [24]"), HasSubstr("[37]")));
  EXPECT_THAT(message(head.hidden, head.weight, head.target, {.chunk = 0}), HasSubstr("chunk is 0"));
  EXPECT_THAT(message(head.hidden, head.weight, head.target, {.label_smoothing = 1.5}),
              HasSubstr("label_smoothing is 1.5"));
  EXPECT_THAT(message(head.hidden, head.weight, head.target, {.label_smoothing = std::nan("")}),
              HasSubstr("label_smoothing is nan"));
}

}  // namespace
}  // namespace snug::chunked_loss_test
