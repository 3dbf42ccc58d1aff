#include "program/models/mlp.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"

namespace snug::mlp_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(Mlp, MapsTheFirstSizeToTheLast) {
  Mlp model(MlpOptions{.sizes = {3, 8, 5, 2}});
  EXPECT_EQ(model->forward(torch::randn({7, 3})).sizes(), (std::vector<int64_t>{7, 2}));
  EXPECT_EQ(model->forward(torch::randn({4, 7, 3})).sizes(), (std::vector<int64_t>{4, 7, 2}));
}

TEST(Mlp, NamesItsParametersByLayer) {
  Mlp model(MlpOptions{.sizes = {3, 4, 2}});
  EXPECT_THAT(model->named_parameters().keys(),
              ElementsAre("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"));
}

TEST(Mlp, IsLinearWithoutHiddenLayers) {
  Mlp model(MlpOptions{.sizes = {3, 2}});
  const auto x = torch::randn({5, 3});
  const auto expected =
      torch::linear(x, model->named_parameters()["layers.0.weight"], model->named_parameters()["layers.0.bias"]);
  EXPECT_TRUE(torch::equal(model->forward(x), expected));
}

TEST(Mlp, AppliesItsActivationBetweenLayersOnly) {
  const auto x = torch::randn({5, 3});
  const auto expect = [&](MlpActivation activation, auto function) {
    Mlp model(MlpOptions{.sizes = {3, 4, 2}, .activation = activation});
    const auto p = model->named_parameters();
    const auto hidden = function(torch::linear(x, p["layers.0.weight"], p["layers.0.bias"]));
    const auto expected = torch::linear(hidden, p["layers.1.weight"], p["layers.1.bias"]);
    EXPECT_TRUE(torch::equal(model->forward(x), expected));
  };
  expect(MlpActivation::Relu, [](const auto& h) { return torch::relu(h); });
  expect(MlpActivation::Gelu, [](const auto& h) { return torch::gelu(h); });
  expect(MlpActivation::Tanh, [](const auto& h) { return torch::tanh(h); });
  expect(MlpActivation::Silu, [](const auto& h) { return torch::silu(h); });
}

TEST(Mlp, RefusesSizesThatCannotWork) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{}, {3}, {3, 0, 2}, {-1, 2}}) {
    EXPECT_THAT([&] { Mlp(MlpOptions{.sizes = sizes}); }, ThrowsMessage<ConfigError>(HasSubstr("Mlp: sizes")));
  }
}

}  // namespace
}  // namespace snug::mlp_test
