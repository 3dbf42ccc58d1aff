#include "program/models/gpt.h"

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"

namespace snug::gpt_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;
using torch::Tensor;

constexpr GptOptions kSmall{.vocab = 17, .context = 12, .layers = 3, .heads = 2, .width = 8};

Gpt small_gpt(GptOptions options = kSmall) {
  torch::manual_seed(3);
  return Gpt(options);
}

Tensor random_tokens(int64_t batch, int64_t time) { return torch::randint(17, {batch, time}); }

int64_t parameter_count(const torch::nn::Module& module) {
  int64_t count = 0;
  for (const Tensor& parameter : module.parameters()) {
    count += parameter.numel();
  }
  return count;
}

TEST(Gpt, GivesLogitsAndHiddenStatesForEveryToken) {
  Gpt model = small_gpt();
  for (const int64_t time : {1, 5, 12}) {
    const Tensor tokens = random_tokens(4, time);
    EXPECT_EQ(model->forward(tokens).sizes(), (std::vector<int64_t>{4, time, 17}));
    EXPECT_EQ(model->hidden(tokens).sizes(), (std::vector<int64_t>{4, time, 8}));
  }
}

TEST(Gpt, LooksAtNoLaterToken) {
  Gpt model = small_gpt();
  const Tensor tokens = random_tokens(2, 12);
  const Tensor before = model->forward(tokens);
  for (int64_t changed = 0; changed < 12; ++changed) {
    Tensor other = tokens.clone();
    other.select(1, changed).add_(1).remainder_(17);
    const Tensor after = model->forward(other);
    using torch::indexing::Slice;
    EXPECT_TRUE(torch::equal(before.index({Slice(), Slice(0, changed)}), after.index({Slice(), Slice(0, changed)})))
        << changed;
    for (int64_t i = changed; i < 12; ++i) {  // and at every earlier one
      EXPECT_FALSE(torch::equal(before.select(1, i), after.select(1, i))) << changed << " " << i;
    }
  }
}

TEST(Gpt, GivesAPrefixTheSameLogitsAsAlone) {
  Gpt model = small_gpt();
  const Tensor tokens = random_tokens(2, 12);
  EXPECT_TRUE(
      torch::allclose(model->forward(tokens).narrow(1, 0, 5), model->forward(tokens.narrow(1, 0, 5)), 1e-5, 1e-6));
}

TEST(Gpt, TiesTheHeadToTheTokenEmbedding) {
  Gpt model = small_gpt();
  EXPECT_TRUE(model->head_weight().is_same(model->token_embedding->weight));
  const Tensor tokens = random_tokens(2, 5);
  EXPECT_TRUE(
      torch::equal(model->forward(tokens), torch::linear(model->hidden(tokens), model->token_embedding->weight)));
  // Token 16 does not occur: only the head can give its row a gradient.
  model->forward(torch::zeros({1, 3}, torch::kLong)).square().sum().backward();
  EXPECT_GT(model->token_embedding->weight.grad()[16].abs().sum().item<double>(), 0);
}

TEST(Gpt, NamesItsParametersReadably) {
  Gpt model = small_gpt({.vocab = 17, .context = 12, .layers = 1, .heads = 2, .width = 8});
  EXPECT_THAT(model->named_parameters().keys(),
              ElementsAre("token_embedding.weight", "position_embedding.weight", "blocks.0.attention_norm.weight",
                          "blocks.0.attention_norm.bias", "blocks.0.attention.qkv.weight",
                          "blocks.0.attention.qkv.bias", "blocks.0.attention.projection.weight",
                          "blocks.0.attention.projection.bias", "blocks.0.mlp_norm.weight", "blocks.0.mlp_norm.bias",
                          "blocks.0.mlp.up.weight", "blocks.0.mlp.up.bias", "blocks.0.mlp.down.weight",
                          "blocks.0.mlp.down.bias", "norm.weight", "norm.bias"));
  EXPECT_TRUE(model->buffers().empty());
}

// Weights and biases of a block: two norms 4 w, attention 4 w^2 + 4 w, MLP 8 w^2 + 5 w.
TEST(Gpt, HasAsManyParametersAsTheArchitectureSays) {
  const auto expected = [](int64_t vocab, int64_t context, int64_t layers, int64_t width) {
    return (vocab + context) * width + layers * (12 * width * width + 13 * width) + 2 * width;
  };
  EXPECT_EQ(parameter_count(*small_gpt()), expected(17, 12, 3, 8));
  EXPECT_EQ(parameter_count(*Gpt(gpt_configuration("gpt-tiny"))), 842'496);
  EXPECT_EQ(parameter_count(*Gpt(gpt_configuration("gpt-small"))), expected(256, 256, 12, 256));
}

TEST(Gpt, StartsLikeGpt2) {
  torch::manual_seed(1);
  Gpt model(GptOptions{.context = 128, .layers = 8, .heads = 4, .width = 128});
  for (const auto& item : model->named_parameters()) {
    const std::string& name = item.key();
    if (name.ends_with("norm.weight")) {
      EXPECT_TRUE(item.value().eq(1).all().item<bool>()) << name;
    } else if (name.ends_with("bias")) {
      EXPECT_TRUE(item.value().eq(0).all().item<bool>()) << name;
    } else {
      const bool residual = name.ends_with("projection.weight") || name.ends_with("down.weight");
      const double deviation = residual ? 0.02 / 4 : 0.02;  // sqrt(2 * 8 layers) = 4
      const auto count = static_cast<double>(item.value().numel());
      // Five standard errors of the estimates.
      EXPECT_NEAR(item.value().std().item<double>(), deviation, 5 * deviation / sqrt(2 * count)) << name;
      EXPECT_NEAR(item.value().mean().item<double>(), 0, 5 * deviation / sqrt(count)) << name;
    }
  }
  // So an untrained model knows nothing: its loss is that of guessing among 256.
  const Tensor tokens = torch::randint(256, {4, 128});
  const Tensor loss = torch::cross_entropy_loss(model->forward(tokens).view({-1, 256}), torch::randint(256, {4 * 128}));
  EXPECT_NEAR(loss.item<double>(), std::log(256.0), 0.1);
}

TEST(Gpt, IsTheSameForTheSameSeed) {
  const auto a = small_gpt()->parameters();
  const auto b = small_gpt()->parameters();
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(torch::equal(a[i], b[i])) << i;
  }
}

TEST(Gpt, RunsEachBlockOnceThroughTheRunner) {
  Gpt model = small_gpt();
  const Tensor tokens = random_tokens(2, 7);
  const Tensor direct = model->forward(tokens);
  int64_t calls = 0;
  std::vector<std::function<Tensor(Tensor)>> kept;
  model->set_block_runner([&](const auto& block, Tensor x) {
    ++calls;
    kept.emplace_back(block);
    return block(std::move(x));
  });
  EXPECT_TRUE(torch::equal(model->forward(tokens), direct));
  EXPECT_EQ(calls, 3);
  // In order, and callable after forward has returned.
  const Tensor x = torch::randn({2, 7, 8});
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(torch::equal(kept[i](x), model->blocks[i]->forward(x)));
  }
  model->set_block_runner({});
  EXPECT_TRUE(torch::equal(model->forward(tokens), direct));
  EXPECT_EQ(calls, 3);
}

TEST(Gpt, LetsTheRunnerReplaceABlock) {
  Gpt model = small_gpt();
  model->set_block_runner([](const auto&, Tensor x) { return x; });
  const Tensor tokens = random_tokens(1, 4);
  const Tensor embedded = model->token_embedding->forward(tokens) + model->position_embedding->weight.narrow(0, 0, 4);
  EXPECT_TRUE(torch::equal(model->hidden(tokens), model->norm->forward(embedded)));
}

TEST(Gpt, DropsOutInTrainingOnly) {
  GptOptions options = kSmall;
  options.dropout = 0.5;
  Gpt model = small_gpt(options);
  const Tensor tokens = random_tokens(1, 8);
  EXPECT_FALSE(torch::equal(model->forward(tokens), model->forward(tokens)));
  model->eval();
  EXPECT_TRUE(torch::equal(model->forward(tokens), model->forward(tokens)));
}

TEST(Gpt, HasAGradientForEveryParameter) {
  Gpt model = small_gpt();
  model->forward(random_tokens(2, 12)).square().sum().backward();
  for (const auto& item : model->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_GT(item.value().grad().abs().sum().item<double>(), 0) << item.key();
  }
}

TEST(Gpt, LearnsToCopyAShortText) {
  Gpt model = small_gpt({.vocab = 17, .context = 12, .layers = 2, .heads = 2, .width = 32});
  const Tensor text = random_tokens(1, 13);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01));
  double loss_value = 0;
  for (int step = 0; step < 60; ++step) {
    optimizer.zero_grad();
    const Tensor logits = model->forward(text.narrow(1, 0, 12));
    const Tensor loss = torch::cross_entropy_loss(logits.view({-1, 17}), text.narrow(1, 1, 12).reshape({-1}));
    loss.backward();
    optimizer.step();
    loss_value = loss.item<double>();
  }
  EXPECT_LT(loss_value, 0.1);
}

TEST(Gpt, RefusesOptionsThatCannotWork) {
  const auto making = [](auto change) {
    GptOptions options = kSmall;
    change(options);
    return [options] { Gpt{options}; };
  };
  const auto refused = [](const char* what) { return ThrowsMessage<ConfigError>(HasSubstr(what)); };
  EXPECT_THAT(making([](auto& o) { o.vocab = 0; }), refused("vocab is 0"));
  EXPECT_THAT(making([](auto& o) { o.context = -1; }), refused("context is -1"));
  EXPECT_THAT(making([](auto& o) { o.layers = 0; }), refused("layers is 0"));
  EXPECT_THAT(making([](auto& o) { o.heads = 0; }), refused("heads is 0"));
  EXPECT_THAT(making([](auto& o) { o.width = 0; }), refused("width is 0"));
  EXPECT_THAT(making([](auto& o) { o.mlp_ratio = 0; }), refused("mlp_ratio is 0"));
  EXPECT_THAT(making([](auto& o) { o.heads = 3; }), refused("3 heads do not divide a width of 8"));
  EXPECT_THAT(making([](auto& o) { o.dropout = 1; }), refused("dropout is 1"));
  EXPECT_THAT(making([](auto& o) { o.dropout = std::numeric_limits<double>::quiet_NaN(); }), refused("dropout is nan"));
}

TEST(Gpt, RefusesTokensThatItCannotTake) {
  Gpt model = small_gpt();
  const auto forward = [&](const Tensor& tokens) { return [&, tokens] { model->forward(tokens); }; };
  EXPECT_THAT(forward(random_tokens(2, 13)),
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("13 tokens"), HasSubstr("context is 12"))));
  EXPECT_THAT(forward(random_tokens(2, 0)), ThrowsMessage<ConfigError>(HasSubstr("0 tokens")));
  EXPECT_THAT(forward(torch::zeros({3}, torch::kLong)),
              ThrowsMessage<ConfigError>(HasSubstr("[3]; give int64 [batch, time]")));
  EXPECT_THAT(forward(torch::zeros({2, 3})), ThrowsMessage<ConfigError>(HasSubstr("Float")));
}

TEST(GptConfiguration, KnowsItsNames) {
  EXPECT_THAT(gpt_configuration_names(), ElementsAre("gpt-tiny", "gpt-small", "gpt-medium", "gpt-base"));
  const GptOptions base = gpt_configuration("gpt-base");
  EXPECT_EQ(base.layers, 12);
  EXPECT_EQ(base.width, 768);
  EXPECT_EQ(base.heads, 12);
  EXPECT_EQ(base.context, 1024);
  EXPECT_EQ(base.vocab, 256);
}

TEST(GptConfiguration, NamesTheNearestForAnUnknownName) {
  const auto asking = [](const char* name) { return [=] { gpt_configuration(name); }; };
  const auto meant = [](const std::string& name) {
    return ThrowsMessage<ConfigError>(HasSubstr("did you mean '" + name + "'?"));
  };
  EXPECT_THAT(asking("gpt-tyni"), meant("gpt-tiny"));
  EXPECT_THAT(asking("small"), meant("gpt-small"));
  EXPECT_THAT(asking("gpt_base"), meant("gpt-base"));
}

}  // namespace
}  // namespace snug::gpt_test
