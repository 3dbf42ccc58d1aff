#include "program/models/resnet.h"

#include <filesystem>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "program/datasets/digits.h"
#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/extra/batch_norm.h"
#include "tests/support/tensors.h"

namespace snug::resnet_test {
namespace {

using namespace testing;
using ::testing::HasSubstr;

int64_t parameters_of(const ResNetOptions& options) {
  int64_t count = 0;
  for (const auto& parameter : ResNet(options)->parameters()) {
    count += parameter.numel();
  }
  return count;
}

// He et al. 2015, table 6 (0.27 M, 0.46 M, 0.66 M, 0.85 M, 1.7 M), in full.
TEST(ResNet, HasThePapersParameters) {
  EXPECT_EQ(parameters_of({.depth = 20}), 269722);
  EXPECT_EQ(parameters_of({.depth = 32}), 464154);
  EXPECT_EQ(parameters_of({.depth = 44}), 658586);
  EXPECT_EQ(parameters_of({.depth = 56}), 853018);
  EXPECT_EQ(parameters_of({.depth = 110}), 1727962);
  const int64_t projections = (16 * 32 + 2 * 32) + (32 * 64 + 2 * 64);
  EXPECT_EQ(parameters_of({.depth = 20, .shortcut = ResNetShortcut::Project}), 269722 + projections);
}

TEST(ResNet, HalvesThePictureFromStageToStage) {
  ResNet model(ResNetOptions{.depth = 6, .widths = {4, 8}, .classes = 3, .in_channels = 1});
  ASSERT_EQ(model->blocks.size(), 2U);
  EXPECT_EQ(model->blocks[0]->forward(torch::randn({2, 4, 9, 6})).sizes(), (std::vector<int64_t>{2, 4, 9, 6}));
  EXPECT_EQ(model->blocks[1]->forward(torch::randn({2, 4, 9, 6})).sizes(), (std::vector<int64_t>{2, 8, 5, 3}));
  EXPECT_EQ(model->features(torch::randn({2, 1, 9, 6})).sizes(), (std::vector<int64_t>{2, 8}));
  EXPECT_EQ(model->forward(torch::randn({2, 1, 9, 6})).sizes(), (std::vector<int64_t>{2, 3}));
}

TEST(ResNet, PadsTheShortcutWithZerosOrProjectsIt) {
  for (const auto shortcut : {ResNetShortcut::Pad, ResNetShortcut::Project}) {
    ResNetBlock block(2, 3, 2, shortcut);
    const torch::NoGradGuard no_grad;
    block->branch->ptr(4)->as<torch::nn::BatchNorm2d>()->weight.zero_();  // the branch gives zeros
    const auto x = torch::rand({2, 2, 4, 4});
    const auto every_second = x.slice(2, 0, 4, 2).slice(3, 0, 4, 2);
    const auto expected = shortcut == ResNetShortcut::Pad ? torch::cat({every_second, torch::zeros({2, 1, 2, 2})}, 1)
                                                          : block->projection->forward(x).relu();
    EXPECT_TRUE(torch::equal(block->forward(x), expected));
  }
}

TEST(ResNet, RunsItsBlocksThroughTheRunnerWithTheSameGradients) {
  torch::manual_seed(1);
  ResNet model(ResNetOptions{.depth = 14, .widths = {4, 8, 8}, .shortcut = ResNetShortcut::Project});
  const auto x = torch::randn({4, 3, 8, 8});
  const auto gradients = [&] {
    model->zero_grad();
    model->forward(x).square().sum().backward();
    return gradients_of(*model);
  };
  const auto plain = gradients();
  int calls = 0;
  model->set_block_runner([&](const auto& block, auto h) {
    ++calls;
    return checkpoint(block, h);
  });
  EXPECT_TRUE(same_bits(gradients(), plain));
  EXPECT_EQ(calls, 6);
}

TEST(ResNet, TakesGroupNormInPlaceOfEveryBatchNorm) {
  ResNet model(ResNetOptions{.depth = 8, .shortcut = ResNetShortcut::Project});
  EXPECT_EQ(batch_norm_to_group_norm(*model, 8).size(), 1U + 6 + 2);
  model->forward(torch::randn({1, 3, 8, 8})).sum().backward();
}

TEST(ResNet, LearnsDigits) {
  const auto folder = std::filesystem::path(__FILE__).parent_path() / "../../build/data/digits";
  if (!std::filesystem::is_directory(folder)) {
    GTEST_SKIP() << folder << " is not there; script/setup fetches it";
  }
  const Digits digits = load_digits(folder);
  torch::manual_seed(0);
  ResNet model(ResNetOptions{.depth = 8, .widths = {8, 16, 32}, .in_channels = 1});
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.01));
  for (int64_t step = 0; step < 40; ++step) {
    optimizer.zero_grad();
    const auto logits = model->forward(digits.images.narrow(0, step * 50, 50));
    torch::nn::functional::cross_entropy(logits, digits.labels.narrow(0, step * 50, 50)).backward();
    optimizer.step();
  }
  const torch::NoGradGuard no_grad;
  const auto images = digits.images.narrow(0, 4000, 1000), labels = digits.labels.narrow(0, 4000, 1000);
  precise_batch_norm(*model, [&] {
    for (const auto& batch : digits.images.narrow(0, 0, 500).split(50)) {
      model->forward(batch);
    }
  });
  model->eval();
  const double right = model->forward(images).argmax(1).eq(labels).to(torch::kDouble).mean().item<double>();
  EXPECT_GT(right, 0.6) << "of pictures that it has not seen; guessing gives 0.1";
}

TEST(ResNet, RefusesOptionsAndPicturesThatCannotWork) {
  const auto message = [](const ResNetOptions& options) {
    return error_of<ConfigError>([&] { ResNet model(options); });
  };
  EXPECT_THAT(message({.depth = 18}), HasSubstr("depth is 18; with 3 stages give 6n + 2: 8, 14, 20, ..."));
  EXPECT_THAT(message({.depth = 2}), HasSubstr("depth is 2"));
  EXPECT_THAT(message({.widths = {}}), HasSubstr("widths are []"));
  EXPECT_THAT(message({.widths = {16, 8, 32}}), HasSubstr("[16, 8, 32]"));
  EXPECT_THAT(message({.classes = 0}), HasSubstr("classes is 0"));
  EXPECT_THAT(message({.dropout = 1}), HasSubstr("dropout is 1"));
  EXPECT_THAT(error_of<ConfigError>([] { ResNet()->forward(torch::rand({2, 1, 4, 4})); }),
              HasSubstr("pictures are [2, 1, 4, 4]; give [N, 3, height, width]"));
}

}  // namespace
}  // namespace snug::resnet_test
