#include "snug/optim/adamw8bit.h"

#include <map>
#include <mutex>
#include <set>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core/error.h"
#include "snug/precision/grad_scaler.h"
#include "tests/support/optimizers.h"
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
std::vector<Tensor> parameters() {
  torch::manual_seed(1);
  return {torch::randn({100, 77}).requires_grad_(), torch::randn({77}).requires_grad_()};
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
  const auto run = [](double scale, bool with_skip) {
    const auto p = parameters();
    AdamW8bit optimizer(p, {.lr = 0.01});
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
  const auto run = [](int threads) {
    const int before = torch::get_num_threads();
    torch::set_num_threads(threads);
    torch::manual_seed(1);
    const Tensor p = torch::randn({300, 1000}).requires_grad_();
    AdamW8bit optimizer({p}, {.lr = 0.01});
    train(optimizer, {p}, 1, 3);
    torch::set_num_threads(before);
    return p.detach().clone();
  };
  EXPECT_TRUE(same_bits(run(1), run(2)));
}

std::vector<Tensor> parameters_in_bf16() {
  auto all = parameters();
  for (Tensor& parameter : all) {
    parameter = parameter.detach().to(torch::kBFloat16).requires_grad_();
  }
  return all;
}

TEST(AdamW8bit, UpdatesBf16ParametersAsItDoesFp32OnesUpToRounding) {
  const auto low = parameters_in_bf16();
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
  const auto p = parameters_in_bf16();
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

TEST(AdamW8bit, RefusesWhatItCannotUpdate) {
  EXPECT_THAT(error_of<ConfigError>([] {
                const auto p = parameters_in_bf16();
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
