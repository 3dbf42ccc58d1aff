#include <map>
#include <mutex>
#include <set>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/clip.h"
#include "snug/core.h"
#include "snug/grad_scaler.h"
#include "snug/memory.h"
#include "snug/step_in_backward.h"
#include "snug/stepper.h"
#include "tests/support/optimizers.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::adamw8bit_test {
namespace {

using testing::clones_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::same_bits;
using testing::set_gradients;
using testing::tensors_in;
using testing::train;
using torch::Tensor;

/// A matrix that is quantised, with a last block that is not full, and a bias that is not.
std::vector<Tensor> parameters(at::ScalarType dtype = torch::kFloat) {
  torch::manual_seed(1);
  return {torch::randn({100, 77}).to(dtype).requires_grad_(), torch::randn({77}).to(dtype).requires_grad_()};
}

TEST(AdamW8bit, TakesStepsCloseToThoseOfAdamW) {
  const auto p = parameters(), q = parameters(), start = clones_of(p);
  AdamW8bit optimizer(p, {.lr = 0.01});
  AdamW reference(q, {.lr = 0.01});
  train(optimizer, p, 1, 30);
  train(reference, q, 1, 30);
  // The way that they went differs by the error of 8-bit moments, about a tenth in the worst element and less on
  // average.
  const double way = (q[0] - start[0]).norm().item<double>();
  EXPECT_LT((p[0] - q[0]).norm().item<double>(), 0.1 * way);
  EXPECT_GT((p[0] - q[0]).norm().item<double>(), 0) << "it must be quantised at all";
  EXPECT_TRUE(same_bits(p[1].detach(), q[1].detach())) << "small ones stay FP32";
}

TEST(AdamW8bit, KeepsAQuarterOfTheState) {
  const Tensor p = torch::zeros({256, 1024}, torch::requires_grad());
  const auto bytes = [&](auto&& optimizer) {
    train(optimizer, {p}, 1, 1);
    return testing::bytes_of(tensors_in(optimizer.state_dict()));
  };
  const auto full = static_cast<double>(bytes(AdamW({p})));
  const auto quantized = static_cast<double>(bytes(AdamW8bit({p})));
  EXPECT_LT(quantized, 0.26 * full);
}

TEST(AdamW8bit, UnscalesAndSkipsWithAScaler) {
  const auto run = [](double scale, bool with_skip, at::ScalarType dtype) {
    const auto p = parameters(dtype);
    AdamW8bit optimizer(p, {.lr = 0.01, .split_weights = dtype == torch::kBFloat16});
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
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    EXPECT_TRUE(same_bits(run(1024, true, dtype), run(1024, false, dtype)));
    EXPECT_TRUE(same_bits(run(1024, false, dtype), run(1, false, dtype)));
  }
}

TEST(AdamW8bit, GoesOnToTheBitAfterLoading) {
  const auto p = parameters();
  AdamW8bit optimizer(p, {.lr = 0.01});
  train(optimizer, p, 1, 3);
  const auto q = clones_of(p);
  for (const Tensor& t : q) {
    t.requires_grad_();
  }
  AdamW8bit resumed(q);
  resumed.load_state_dict(optimizer.state_dict());
  train(optimizer, p, 4, 6);
  train(resumed, q, 4, 6);
  EXPECT_TRUE(same_bits(clones_of(q), clones_of(p)));
}

TEST(AdamW8bit, RefusesAStateWithOtherTensorsOrTypes) {
  const auto p = parameters();
  AdamW8bit optimizer(p, {.lr = 0.01, .min_elements = 1});
  train(optimizer, p, 1, 1);
  AdamW8bit larger(parameters());  // keeps the bias in FP32
  EXPECT_THAT(error_of<CorruptFile>([&] { larger.load_state_dict(optimizer.state_dict()); }), HasSubstr("parameter 1"));
  AdamW full(parameters());
  EXPECT_THROW(full.load_state_dict(optimizer.state_dict()), CorruptFile);
}

TEST(AdamW8bit, RefusesParametersThatAreNotContiguous) {
  const Tensor p = torch::randn({8, 8, 8, 8}).contiguous(torch::MemoryFormat::ChannelsLast).requires_grad_();
  AdamW8bit optimizer({p}, {.min_elements = 1});
  p.mutable_grad() = torch::ones_like(p);
  EXPECT_THAT(error_of<ConfigError>([&] { optimizer.step(); }), HasSubstr("not contiguous"));
}

TEST(AdamW8bit, DoesNotDependOnTheNumberOfThreads) {
  const auto run = [](int threads, at::ScalarType dtype) {
    const int before = torch::get_num_threads();
    torch::set_num_threads(threads);
    torch::manual_seed(1);
    const Tensor p = torch::randn({300, 1000}).to(dtype).requires_grad_();
    AdamW8bit optimizer({p}, {.lr = 0.01, .split_weights = dtype == torch::kBFloat16});
    train(optimizer, {p}, 1, 3);
    torch::set_num_threads(before);
    return p.detach().clone();
  };
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    EXPECT_TRUE(same_bits(run(1, dtype), run(2, dtype)));
  }
}

TEST(AdamW8bit, UpdatesBf16ParametersAsItDoesFp32OnesUpToRounding) {
  const auto low = parameters(torch::kBFloat16);
  auto full = clones_of(low);
  for (Tensor& parameter : full) {
    parameter = parameter.to(torch::kFloat).requires_grad_();
  }
  AdamW8bit optimizer(low, {.lr = 1e-3, .split_weights = true});
  AdamW8bit reference(full, {.lr = 1e-3});
  const auto start = clones_of(full);
  for (uint64_t seed = 1; seed <= 30; ++seed) {  // most of these steps are below BF16's resolution
    set_gradients(low, seed);
    for (size_t i = 0; i < low.size(); ++i) {
      full[i].mutable_grad() = low[i].grad().to(torch::kFloat);
    }
    optimizer.step();
    reference.step();
  }
  for (size_t i = 0; i < low.size(); ++i) {
    const Tensor rounded = full[i].detach().to(torch::kBFloat16);
    EXPECT_LT((low[i] != rounded).sum().item<int64_t>(), low[i].numel() / 20 + 1) << i;
    EXPECT_FALSE(same_bits(low[i].detach(), start[i].to(torch::kBFloat16))) << i;
  }
}

TEST(AdamW8bit, InBf16TakesThreeBytesOfStateAndGoesOnToTheBit) {
  const auto p = parameters(torch::kBFloat16);
  AdamW8bit optimizer(p, {.lr = 0.01, .split_weights = true});
  const int64_t foretold = optimizer.state_bytes_to_come();
  train(optimizer, p, 1, 3);
  const int64_t large = p[0].numel(), small = p[1].numel();
  const int64_t state = testing::bytes_of(tensors_in(optimizer.state_dict()));
  EXPECT_EQ(state, 4 + 3 * large + 2 * 4 * ((large + 255) / 256) + 4 + 3 * 4 * small);
  EXPECT_EQ(foretold, state);
  const auto q = clones_of(p);
  for (const Tensor& t : q) {
    t.requires_grad_();
  }
  AdamW8bit resumed(q, {.split_weights = true});
  resumed.load_state_dict(optimizer.state_dict());
  train(optimizer, p, 4, 6);
  train(resumed, q, 4, 6);
  EXPECT_TRUE(same_bits(clones_of(q), clones_of(p)));
}

torch::nn::Sequential bf16_model() {
  auto model = testing::tiny_model();
  model->to(torch::kBFloat16);
  return model;
}

Loss loss_of(torch::nn::Sequential& model, const Batch& batch) {
  return testing::squared_error(model->forward(batch[0].to(torch::kBFloat16)), batch[1]);
}

// Without a parameter that has an FP32 state.
AdamW8bitOptions all_split(double lr) { return {.lr = lr, .min_elements = 1, .split_weights = true}; }

TEST(AdamW8bit, InBf16TakesSevenBytesAParameterWithItsGradient) {
  constexpr int64_t kElements = 256 * 1000;
  const Tensor p = torch::zeros({256, 1000}, torch::kBFloat16).requires_grad_();
  AdamW8bit optimizer({p}, {.split_weights = true});
  train(optimizer, {p}, 1, 1);
  const int64_t all = testing::bytes_of({p.detach(), p.grad()}) + testing::bytes_of(tensors_in(optimizer.state_dict()));
  EXPECT_EQ(all, 7 * kElements + 2 * 4 * kElements / 256 + 4) << "two maxima a block, and the count";
}

TEST(AdamW8bit, InBf16TakesFiveBytesAParameterWithUpdatesInBackward) {
  constexpr int64_t kWidth = 256, kLayers = 6, kElements = kLayers * kWidth * kWidth;
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int i = 0; i < kLayers; ++i) {
    model->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
  }
  model->to(torch::kBFloat16);
  AdamW8bit optimizer(model->parameters(), {.split_weights = true});
  const StepInBackward in_backward(optimizer);
  const Tensor x = torch::randn({1, kWidth}).to(torch::kBFloat16);
  model->forward(x).square().mean().backward();  // makes the state
  const MemoryMeter meter;
  model->forward(x).square().mean().backward();
  EXPECT_LT(meter.report().peak_bytes, 3 * 2 * kWidth * kWidth) << "of six gradients, one or two at a time";
  const int64_t state = testing::bytes_of(tensors_in(optimizer.state_dict()));
  EXPECT_EQ(testing::bytes_of(clones_of(model->parameters())) + state,
            5 * kElements + 2 * 4 * kElements / 256 + kLayers * 4);
}

TEST(AdamW8bit, InBf16StepsBelowBf16sResolutionCount) {
  const Tensor p = torch::ones({100}, torch::kBFloat16).requires_grad_();
  AdamW8bitOptions options = all_split(1e-4);
  options.weight_decay = 0;
  AdamW8bit optimizer({p}, options);
  for (int i = 0; i < 100; ++i) {
    p.mutable_grad() = torch::ones_like(p);
    optimizer.step();
  }
  EXPECT_NEAR(p[7].item<float>(), 0.99, 0.004);
}

TEST(AdamW8bit, InBf16UpdatesInBackwardWithTheSameBits) {
  auto plain = bf16_model(), early = bf16_model();
  AdamW8bit plain_optimizer(plain->parameters(), all_split(0.01)),
      early_optimizer(early->parameters(), all_split(0.01));
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

TEST(AdamW8bit, InBf16AStepperTrainsAsALoopByHandDoes) {
  auto by_hand = bf16_model(), stepped = bf16_model();
  AdamW8bit hand_optimizer(by_hand->parameters(), all_split(0.01)), optimizer(stepped->parameters(), all_split(0.01));
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

TEST(AdamW8bit, InBf16RefusesMastersBesideItsOwn) {
  auto model = bf16_model();
  AdamW8bit optimizer(model->parameters(), all_split(0.01));
  EXPECT_THAT(error_of<ConfigError>([&] {
                Stepper stepper(model, optimizer, {.precision = Precision::BFloat16, .weights = Weights::Low});
                stepper.step(testing::tiny_batch(4), [&](const Batch& micro) { return loss_of(model, micro); });
              }),
              HasSubstr("weights = Low"));
}

TEST(AdamW8bit, InBf16RefusesTheStateOfAnotherOptimizer) {
  const auto p = parameters(torch::kBFloat16);
  AdamW8bit optimizer(p, all_split(0.01));
  train(optimizer, p, 1, 1);
  AdamW with_masters(p, {.master_weights = true});
  EXPECT_THROW(with_masters.load_state_dict(optimizer.state_dict()), Error);
  train(with_masters, p, 1, 1);
  EXPECT_THROW(optimizer.load_state_dict(with_masters.state_dict()), Error);
  const auto q = testing::random_parameters();
  AdamW8bit in_fp32(q, {.min_elements = 1});
  train(in_fp32, q, 1, 1);
  const auto r = testing::random_parameters(torch::kBFloat16);
  AdamW8bit other(r, all_split(0.01));
  EXPECT_THROW(other.load_state_dict(in_fp32.state_dict()), Error);
}

TEST(AdamW8bit, RefusesWhatItCannotUpdate) {
  EXPECT_THAT(error_of<ConfigError>([] {
                const auto p = parameters(torch::kBFloat16);
                AdamW8bit optimizer(p);
                train(optimizer, p, 1, 1);
              }),
              HasSubstr("split_weights"));
  EXPECT_THAT(error_of<ConfigError>([] { AdamW8bit({torch::ones({2}, torch::kDouble)}); }), HasSubstr("parameter 0"));
  EXPECT_THAT(error_of<ConfigError>([] { AdamW8bit({torch::ones({2})}, {.min_elements = 0}); }),
              HasSubstr("min_elements is 0"));
}

}  // namespace
}  // namespace snug::adamw8bit_test
