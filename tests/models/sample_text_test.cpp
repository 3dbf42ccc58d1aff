#include "program/models/sample_text.h"

#include <cmath>
#include <limits>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"

namespace snug::sample_text_test {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

Gpt small_gpt(double dropout = 0) {
  torch::manual_seed(5);
  return Gpt(GptOptions{.context = 8, .layers = 1, .heads = 2, .width = 16, .dropout = dropout});
}

// A model that has learned "abcabc..." by heart.
Gpt alphabet_gpt() {
  Gpt model = small_gpt();
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.02));
  const auto text = torch::tensor({'a', 'b', 'c', 'a', 'b', 'c', 'a', 'b', 'c'}, torch::kLong);
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad();
    const auto logits = model->forward(text.narrow(0, 0, 8).unsqueeze(0));
    torch::cross_entropy_loss(logits.view({-1, 256}), text.narrow(0, 1, 8)).backward();
    optimizer.step();
  }
  return model;
}

TEST(SampleText, ContinuesWhatTheModelHasLearned) {
  Gpt model = alphabet_gpt();
  EXPECT_EQ(sample_text(model, "abca", {.count = 5, .temperature = 0}), "bcabc");
  EXPECT_EQ(sample_text(model, "abca", {.count = 5, .temperature = 0.1}), "bcabc");
}

TEST(SampleText, GoesOnBeyondTheContext) {
  Gpt model = alphabet_gpt();
  EXPECT_EQ(sample_text(model, "abcabcabcabcabcab", {.count = 20}).size(), 20u);
}

TEST(SampleText, TakesAnEmptyPromptForALineBreak) {
  Gpt model = small_gpt();
  EXPECT_EQ(sample_text(model, "", {.count = 9}), sample_text(model, "\n", {.count = 9}));
  EXPECT_EQ(sample_text(model, "a", {.count = 0}), "");
}

TEST(SampleText, TakesPromptsOfAnyBytes) {
  Gpt model = small_gpt();
  EXPECT_EQ(sample_text(model, "\xff\x80", {.count = 3}).size(), 3u);
}

TEST(SampleText, DependsOnItsSeedAloneAndLeavesTheDefaultGeneratorAlone) {
  Gpt model = small_gpt();
  torch::manual_seed(1);
  const auto expected = torch::rand({3});
  torch::manual_seed(1);
  const std::string first = sample_text(model, "a", {.count = 30, .seed = 4});
  EXPECT_TRUE(torch::equal(torch::rand({3}), expected));
  EXPECT_EQ(sample_text(model, "a", {.count = 30, .seed = 4}), first);
  EXPECT_NE(sample_text(model, "a", {.count = 30, .seed = 5}), first);
}

TEST(SampleText, KeepsToTheLikeliestBytes) {
  Gpt model = small_gpt();
  const auto greedy = sample_text(model, "a", {.count = 10, .temperature = 0});
  EXPECT_EQ(sample_text(model, "a", {.count = 10, .temperature = 5, .top_k = 1}), greedy);
  // After "a" only the two likeliest bytes come.
  const auto logits = model->forward(torch::full({1, 1}, 'a', torch::kLong)).select(1, 0)[0];
  const auto best = std::get<1>(logits.topk(2));
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const auto text = sample_text(model, "a", {.count = 1, .top_k = 2, .seed = seed});
    const int64_t byte = static_cast<unsigned char>(text.front());
    EXPECT_TRUE(best.eq(byte).any().item<bool>());
  }
}

TEST(SampleText, DrawsEachByteAsOftenAsItsProbability) {
  Gpt model = small_gpt();
  const auto logits = model->forward(torch::full({1, 1}, 'a', torch::kLong)).select(1, 0)[0];
  const auto probability = torch::softmax(
      logits.detach().masked_fill(logits < std::get<0>(logits.topk(2))[1], -std::numeric_limits<float>::infinity()), 0);
  const auto best = logits.argmax().item<int64_t>();
  const double p = probability[best].item<double>();
  int64_t hits = 0;
  constexpr int64_t kDraws = 400;
  for (uint64_t seed = 0; seed < kDraws; ++seed) {
    const auto text = sample_text(model, "a", {.count = 1, .top_k = 2, .seed = seed});
    hits += static_cast<unsigned char>(text.front()) == best ? 1 : 0;
  }
  EXPECT_NEAR(static_cast<double>(hits) / kDraws, p, 5 * std::sqrt(p * (1 - p) / kDraws));
}

TEST(SampleText, RunsWithoutDropoutAndLeavesTheModeAsItWas) {
  Gpt model = small_gpt(0.5);
  const auto text = sample_text(model, "a", {.count = 20, .temperature = 0});
  EXPECT_EQ(sample_text(model, "a", {.count = 20, .temperature = 0}), text);
  EXPECT_TRUE(model->is_training());
  EXPECT_TRUE(model->blocks[0]->dropout->is_training());
  model->eval();
  sample_text(model, "a", {.count = 1});
  EXPECT_FALSE(model->is_training());
}

TEST(SampleText, RefusesWhatCannotWork) {
  Gpt model = small_gpt();
  const auto sampling = [&](SampleOptions options) { return [&, options] { sample_text(model, "a", options); }; };
  const auto refused = [](const char* what) { return ThrowsMessage<ConfigError>(HasSubstr(what)); };
  EXPECT_THAT(sampling({.count = -1}), refused("count is -1"));
  EXPECT_THAT(sampling({.top_k = -1}), refused("top_k is -1"));
  EXPECT_THAT(sampling({.temperature = -0.5}), refused("temperature is -0.5"));
  EXPECT_THAT(sampling({.temperature = std::numeric_limits<double>::infinity()}), refused("temperature is inf"));
  Gpt words(GptOptions{.vocab = 1000, .context = 8, .layers = 1, .heads = 2, .width = 16});
  EXPECT_THAT([&] { sample_text(words, "a"); }, refused("vocabulary is 1000"));
  {
    const torch::NoGradGuard no_grad;
    model->norm->bias.fill_(std::numeric_limits<float>::quiet_NaN());
  }
  EXPECT_THAT(sampling({}), ThrowsMessage<NonFinite>(HasSubstr("diverge")));
}

}  // namespace
}  // namespace snug::sample_text_test
