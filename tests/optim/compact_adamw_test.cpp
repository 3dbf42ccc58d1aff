#include "snug/optim/compact_adamw.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core/error.h"
#include "snug/memory/meter.h"
#include "snug/optim/adamw.h"
#include "snug/optim/adamw8bit.h"
#include "snug/optim/clip.h"
#include "snug/optim/step_in_backward.h"
#include "snug/precision/grad_scaler.h"
#include "snug/step/stepper.h"
#include "tests/support/optimizers.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::compact_adamw_test {
namespace {

using testing::bytes_of;
using testing::clones_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::same_bits;
using testing::set_gradients;
using testing::tensors_in;
using testing::train;
using torch::Tensor;

/// A matrix whose last block is not full, a vector, a scalar, and one without elements.
std::vector<Tensor> parameters() {
  torch::manual_seed(1);
  std::vector<Tensor> all{torch::randn({100, 77}), torch::randn({77}), torch::randn({}), torch::randn({0})};
  for (Tensor& parameter : all) {
    parameter = parameter.to(torch::kBFloat16).requires_grad_();
  }
  return all;
}

std::vector<Tensor> copies_of(const std::vector<Tensor>& parameters) {
  auto copies = clones_of(parameters);
  for (const Tensor& copy : copies) {
    copy.requires_grad_();
  }
  return copies;
}

torch::nn::Sequential bf16_model() {
  auto model = testing::tiny_model();
  model->to(torch::kBFloat16);
  return model;
}

Loss loss_of(torch::nn::Sequential& model, const Batch& batch) {
  return testing::squared_error(model->forward(batch[0].to(torch::kBFloat16)), batch[1]);
}

TEST(CompactAdamW, TakesStepsCloseToThoseOfAdamWWithMasters) {
  const auto p = parameters(), q = parameters(), start = clones_of(p);
  CompactAdamW optimizer(p, {.lr = 0.01});
  AdamW reference(q, {.lr = 0.01, .master_weights = true});
  train(optimizer, p, 1, 30);
  train(reference, q, 1, 30);
  for (size_t i = 0; i < 2; ++i) {
    const Tensor master = tensors_in(reference.state_dict())[4 * i + 3];
    ASSERT_EQ(master.sizes(), q[i].sizes());
    const double way = (master - start[i].to(torch::kFloat)).norm().item<double>();
    const double difference = (optimizer.full_weight(p[i]) - master).norm().item<double>();
    EXPECT_LT(difference, 0.1 * way) << i;
    EXPECT_GT(difference, 0) << "it must be rounded at all";
  }
}

TEST(CompactAdamW, TakesSevenBytesAParameterWithItsGradient) {
  constexpr int64_t kElements = 64 * 1000;
  const Tensor p = torch::zeros({64, 1000}, torch::kBFloat16).requires_grad_();
  CompactAdamW optimizer({p});
  const int64_t foretold = optimizer.state_bytes_to_come();
  train(optimizer, {p}, 1, 1);
  const int64_t state = bytes_of(tensors_in(optimizer.state_dict()));
  EXPECT_EQ(state, 3 * kElements + 2 * 4 * kElements / 64 + 4) << "three bytes each, two scales a block, and the count";
  EXPECT_EQ(foretold, state);
  EXPECT_EQ(bytes_of({p.detach(), p.grad()}) + state, 7 * kElements + kElements / 8 + 4);
}

TEST(CompactAdamW, TakesFiveBytesAParameterWithUpdatesInBackward) {
  constexpr int64_t kWidth = 256, kLayers = 6, kElements = kLayers * kWidth * kWidth;
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int i = 0; i < kLayers; ++i) {
    model->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
  }
  model->to(torch::kBFloat16);
  CompactAdamW optimizer(model->parameters());
  const StepInBackward in_backward(optimizer);
  const Tensor x = torch::randn({1, kWidth}).to(torch::kBFloat16);
  model->forward(x).square().mean().backward();  // makes the state
  const MemoryMeter meter;
  model->forward(x).square().mean().backward();
  EXPECT_LT(meter.report().peak_bytes, 3 * 2 * kWidth * kWidth) << "of six gradients, one or two at a time";
  const int64_t state = bytes_of(tensors_in(optimizer.state_dict()));
  EXPECT_EQ(bytes_of(clones_of(model->parameters())) + state, 5 * kElements + kElements / 8 + kLayers * 4);
}

TEST(CompactAdamW, TheParameterIsTheRoundedWeight) {
  const auto p = parameters();
  CompactAdamW optimizer(p, {.lr = 1e-4});
  EXPECT_TRUE(same_bits(optimizer.full_weight(p[0]), p[0].detach().to(torch::kFloat))) << "before the first update";
  train(optimizer, p, 1, 5);
  const Tensor weight = optimizer.full_weight(p[0]);
  EXPECT_EQ(weight.sizes(), p[0].sizes());
  EXPECT_FALSE(same_bits(weight, p[0].detach().to(torch::kFloat)));
  const Tensor differs = weight.to(torch::kBFloat16) != p[0];  // halves are rounded to even there
  EXPECT_LT(differs.sum().item<int64_t>(), p[0].numel() / 50);
  EXPECT_LE((weight / p[0].to(torch::kFloat) - 1).abs().max().item<float>(), 0x1p-8f);
}

TEST(CompactAdamW, StepsBelowBf16sResolutionCount) {
  const Tensor p = torch::ones({100}, torch::kBFloat16).requires_grad_();
  CompactAdamW optimizer({p}, {.lr = 1e-4, .weight_decay = 0});
  for (int i = 0; i < 100; ++i) {
    p.mutable_grad() = torch::ones_like(p);
    optimizer.step();
  }
  EXPECT_NEAR(p[7].item<float>(), 0.99, 0.004);
}

TEST(CompactAdamW, UnscalesAndSkipsWithAScaler) {
  const auto run = [](double scale, bool with_skip) {
    const auto p = parameters();
    CompactAdamW optimizer(p, {.lr = 0.01});
    GradScaler scaler({.init_scale = scale});
    scaler.scale(torch::ones({}));
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      if (with_skip) {
        set_gradients(p, 9);
        p[1].mutable_grad()[3] = NAN;
        EXPECT_FALSE(scaler.step(optimizer));
        scaler.update(scale);
      }
      set_gradients(p, seed, scale);
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update(scale);
    }
    auto all = clones_of(p);
    const auto state = tensors_in(optimizer.state_dict());
    all.insert(all.end(), state.begin(), state.end());
    return all;
  };
  EXPECT_TRUE(same_bits(run(1024, true), run(1024, false)));
  EXPECT_TRUE(same_bits(run(1024, false), run(1, false)));
}

TEST(CompactAdamW, GoesOnToTheBitAfterLoading) {
  const auto p = parameters();
  CompactAdamW optimizer(p, {.lr = 0.01});
  train(optimizer, p, 1, 3);
  const auto q = copies_of(p);
  CompactAdamW resumed(q);
  resumed.load_state_dict(optimizer.state_dict());
  train(optimizer, p, 4, 6);
  train(resumed, q, 4, 6);
  EXPECT_TRUE(same_bits(clones_of(q), clones_of(p)));
  EXPECT_TRUE(same_bits(tensors_in(resumed.state_dict()), tensors_in(optimizer.state_dict())));
}

TEST(CompactAdamW, UpdatesInBackwardWithTheSameBits) {
  auto plain = bf16_model(), early = bf16_model();
  CompactAdamW plain_optimizer(plain->parameters(), {.lr = 0.01}), early_optimizer(early->parameters(), {.lr = 0.01});
  const StepInBackward in_backward(early_optimizer);
  for (uint64_t i = 0; i < 10; ++i) {
    const Batch batch = testing::tiny_batch(8, i);
    plain_optimizer.zero_grad();
    loss_of(plain, batch).value().backward();
    plain_optimizer.step();
    loss_of(early, batch).value().backward();
  }
  EXPECT_TRUE(same_bits(clones_of(early->parameters()), clones_of(plain->parameters())));
}

TEST(CompactAdamW, AStepperTrainsAModelInBf16AsALoopByHandDoes) {
  auto by_hand = bf16_model(), stepped = bf16_model();
  CompactAdamW hand_optimizer(by_hand->parameters(), {.lr = 0.01}), optimizer(stepped->parameters(), {.lr = 0.01});
  Stepper stepper(stepped, optimizer, {.clip_norm = 0.5});
  for (uint64_t i = 0; i < 10; ++i) {
    const Batch batch = testing::tiny_batch(8, i);
    hand_optimizer.zero_grad();
    const Loss loss = loss_of(by_hand, batch);
    (loss.value() / static_cast<double>(loss.count())).backward();
    clip_grad_norm_(by_hand->parameters(), 0.5);
    hand_optimizer.step();
    stepper.step(batch, [&](const Batch& micro) { return loss_of(stepped, micro); });
  }
  EXPECT_TRUE(same_bits(clones_of(stepped->parameters()), clones_of(by_hand->parameters())));
}

TEST(CompactAdamW, DoesNotDependOnTheNumberOfThreads) {
  const auto run = [](int threads) {
    const int before = torch::get_num_threads();
    torch::set_num_threads(threads);
    torch::manual_seed(1);
    const Tensor p = torch::randn({300, 1000}).to(torch::kBFloat16).requires_grad_();
    CompactAdamW optimizer({p}, {.lr = 0.01});
    train(optimizer, {p}, 1, 3);
    torch::set_num_threads(before);
    return optimizer.full_weight(p);
  };
  EXPECT_TRUE(same_bits(run(1), run(2)));
}

TEST(CompactAdamW, RefusesWhatItCannotUpdate) {
  EXPECT_THAT(error_of<ConfigError>([] { CompactAdamW({torch::ones({2})}); }),
              AllOf(HasSubstr("parameter 0"), HasSubstr("to(torch::kBFloat16)")));
  const auto error_of_step = [](const Tensor& p) {
    CompactAdamW optimizer({p});
    p.mutable_grad() = torch::ones_like(p);
    return error_of<ConfigError>([&] { optimizer.step(); });
  };
  EXPECT_THAT(error_of_step(torch::ones({2}, torch::kHalf).requires_grad_()), HasSubstr("Half"));
  const Tensor channels_last =
      torch::ones({8, 8, 8, 8}, torch::kBFloat16).contiguous(torch::MemoryFormat::ChannelsLast).requires_grad_();
  EXPECT_THAT(error_of_step(channels_last), HasSubstr("not contiguous"));
  EXPECT_THAT(error_of<ConfigError>([] { CompactAdamW(parameters(), {.lr = -1}); }), HasSubstr("lr is -1"));
}

TEST(CompactAdamW, RefusesMastersBesideItsOwn) {
  auto model = bf16_model();
  CompactAdamW optimizer(model->parameters());
  EXPECT_THAT(error_of<ConfigError>([&] {
                Stepper stepper(model, optimizer, {.precision = Precision::BFloat16, .weights = Weights::Low});
                stepper.step(testing::tiny_batch(4), [&](const Batch& micro) { return loss_of(model, micro); });
              }),
              HasSubstr("weights = Low"));
}

TEST(CompactAdamW, RefusesTheStateOfAnotherOptimizer) {
  const auto p = parameters();
  CompactAdamW optimizer(p);
  train(optimizer, p, 1, 1);
  AdamW with_masters(p, {.master_weights = true});
  EXPECT_THROW(with_masters.load_state_dict(optimizer.state_dict()), Error);
  train(with_masters, p, 1, 1);
  EXPECT_THROW(optimizer.load_state_dict(with_masters.state_dict()), Error);
  const auto q = testing::random_parameters();
  AdamW8bit in_fp32(q, {.min_elements = 1});
  train(in_fp32, q, 1, 1);
  const auto r = testing::random_parameters(torch::kBFloat16);
  CompactAdamW other(r);
  EXPECT_THROW(other.load_state_dict(in_fp32.state_dict()), Error);
}

TEST(CompactAdamW, TellsFullWeightsOfItsOwnParametersInMemoryAlone) {
  const auto p = parameters();
  CompactAdamW optimizer(p);
  EXPECT_THAT(error_of<ConfigError>([&] { optimizer.full_weight(torch::ones({2})); }), HasSubstr("does not hold"));
  optimizer.keep_state_in(StateFile{.window = Bytes(192 << 10)});
  EXPECT_THAT(error_of<ConfigError>([&] { optimizer.full_weight(p[0]); }), HasSubstr("keep_state_in_memory"));
}

}  // namespace
}  // namespace snug::compact_adamw_test
