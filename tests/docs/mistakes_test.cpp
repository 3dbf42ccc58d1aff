#include <memory>
#include <string_view>
#include <vector>

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "program/models/gpt.h"
#include "snug/autocast.h"
#include "snug/grad_scaler.h"
#include "snug/memory.h"
#include "snug/stepper.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

// Common mistakes in training loops, a test each: docs/by-hand.md lists them.

namespace snug::mistakes_test {
namespace {

using testing::close_in_norm;
using testing::make_mlp;
using testing::same_bits;
using torch::mse_loss;
using torch::Tensor;
namespace nn = torch::nn;

struct Regression {
  Tensor x, y;

  explicit Regression(int64_t items) {
    torch::manual_seed(5);
    x = torch::randn({items, 4});
    y = x.sin().sum(1, /*keepdim=*/true);
  }
};

// 1
TEST(Mistakes, BackwardRunsInThe16BitsOfTheForward) {
  nn::Linear layer(8, 4);
  const Tensor x = torch::randn({16, 8});
  Tensor y;
  {
    const Autocast autocast(torch::kCPU, torch::kBFloat16);
    y = layer->forward(x);
  }
  torch::ScalarType arrives{};
  y.register_hook([&](const Tensor& gradient) { arrives = gradient.scalar_type(); });
  y.to(torch::kFloat).square().sum().backward();
  const Tensor gradient = layer->weight.grad();
  EXPECT_EQ(arrives, torch::kBFloat16);
  EXPECT_EQ(gradient.scalar_type(), torch::kFloat) << "it looks as if it were FP32 ...";
  EXPECT_TRUE(same_bits(gradient, gradient.to(torch::kBFloat16).to(torch::kFloat))) << "... but was computed in BF16";
}

// 2
TEST(Mistakes, GradientsAreUnscaledBeforeTheUpdate) {
  const Regression data(64);
  auto plain = make_mlp({4, 16, 1}), scaled = make_mlp({4, 16, 1}), too_late = make_mlp({4, 16, 1});
  torch::optim::SGD of_plain(plain->parameters(), 0.1), of_scaled(scaled->parameters(), 0.1),
      of_late(too_late->parameters(), 0.1);
  mse_loss(plain->forward(data.x), data.y).backward();
  of_plain.step();

  GradScaler scaler({.init_scale = 1024});
  scaler.scale(mse_loss(scaled->forward(data.x), data.y)).backward();
  scaler.step(of_scaled);  // unscales, looks for infinities, then updates
  EXPECT_TRUE(same_bits(scaled->parameters(), plain->parameters()));

  GradScaler late({.init_scale = 1024});
  late.scale(mse_loss(too_late->forward(data.x), data.y)).backward();
  of_late.step();
  late.unscale_(of_late);
  EXPECT_GT(mse_loss(too_late->forward(data.x), data.y).item<double>(), 1000) << "a step 1024 times too long";
}

// 3
TEST(Mistakes, TheLossIsDividedByKAndNotTheInput) {
  const Regression data(64);
  constexpr int64_t K = 4;
  const auto train = [&](auto loss_of_part) {
    auto model = make_mlp({4, 16, 1});
    torch::optim::SGD optimizer(model->parameters(), 0.05);
    for (int step = 0; step < 100; ++step) {
      optimizer.zero_grad();
      for (const Batch& part : micro_batches({data.x, data.y}, 64 / K)) {
        loss_of_part(model, part[0], part[1]).backward();
      }
      optimizer.step();
    }
    return mse_loss(model->forward(data.x), data.y).item<double>();
  };
  const auto whole = [&](auto& model, auto&, auto&) { return mse_loss(model->forward(data.x), data.y) / K; };
  const auto right = [](auto& model, auto& x, auto& y) { return mse_loss(model->forward(x), y) / K; };
  const auto wrong = [](auto& model, auto& x, auto& y) { return mse_loss(model->forward(x / K), y); };
  EXPECT_NEAR(train(right), train(whole), 1e-5);
  EXPECT_GT(train(wrong), 10 * train(right)) << "it has learned a function of inputs that never come";
}

// 4
TEST(Mistakes, AnUpdatePerEpochIsOneStepOfTheWholeData) {
  const Regression data(512);
  auto each_batch = make_mlp({4, 16, 1}), each_epoch = make_mlp({4, 16, 1}), whole = make_mlp({4, 16, 1});
  const auto train = [&](nn::Sequential& model, int64_t micro_batch, int64_t accumulate) {
    torch::optim::SGD optimizer(model->parameters(), 0.05);
    Stepper stepper(model, optimizer, {.accumulate = {.every = accumulate}});
    for (const Batch& micro : micro_batches({data.x, data.y}, micro_batch)) {
      stepper.accumulate(micro,
                         [&](const Batch& b) { return Loss::mean(mse_loss(model->forward(b[0]), b[1]), b.size()); });
    }
    return mse_loss(model->forward(data.x), data.y).item<double>();
  };
  EXPECT_LT(train(each_batch, 16, 1), 0.5 * train(each_epoch, 16, 32));
  train(whole, 512, 1);
  for (size_t i = 0; i < whole->parameters().size(); ++i) {
    EXPECT_TRUE(close_in_norm(each_epoch->parameters()[i], whole->parameters()[i], 1e-5));
  }
}

// 5
// Squared error on data that was not trained on, after training to a loss of nothing: 40 examples of a sparse function
// of 100 inputs.
double error_after(int batch, uint64_t seed) {
  torch::manual_seed(seed);
  Tensor truth = torch::zeros({100});
  truth.slice(0, 0, 5).fill_(1);
  const Tensor x = torch::randn({40, 100}), y = x.mv(truth);
  Tensor u = torch::full({100}, 0.3), v = u.clone();
  for (int step = 0; step < 4000; ++step) {
    const Tensor some = batch == 40 ? torch::arange(40) : torch::randint(40, {batch});
    const Tensor rows = x.index_select(0, some);
    const Tensor gradient = rows.t().mv(rows.mv(u * u - v * v) - y.index_select(0, some)) * (4.0 / batch);
    u -= 0.016 * u * gradient;
    v += 0.016 * v * gradient;
  }
  const Tensor found = u * u - v * v;
  EXPECT_LT((x.mv(found) - y).square().mean().item<double>(), 1e-3);
  return (found - truth).square().sum().item<double>();
}

TEST(Mistakes, TheSmallBatchGeneralisesBetterAtTheSameLoss) {
  double small = 0, large = 0;
  for (const uint64_t seed : {1, 2, 3, 4}) {
    small += error_after(1, seed);
    large += error_after(40, seed);
  }
  EXPECT_LT(small, 0.75 * large);
}

// 6
// How often `work` reads a number from the device, for which a GPU's queue would have to run empty.
template <class Work>
int64_t reads_in(Work&& work) {
  static thread_local int64_t reads = 0;
  reads = 0;
  const auto handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback([](const at::RecordFunction& call) -> std::unique_ptr<at::ObserverContext> {
        reads += std::string_view(call.name()) == "aten::_local_scalar_dense" ? 1 : 0;
        return nullptr;
      }));
  work();
  at::removeCallback(handle);
  return reads;
}

TEST(Mistakes, ReadingTheLossInEveryStepWaitsInEveryStep) {
  const Regression data(64);
  auto model = make_mlp({4, 16, 1});
  torch::optim::SGD optimizer(model->parameters(), 0.05);
  Stepper stepper(model, optimizer, {.micro_batch = 16});
  const auto train = [&](int read_every) {
    for (int step = 1; step <= 20; ++step) {
      const StepResult result = stepper.step(
          {data.x, data.y}, [&](const Batch& b) { return Loss::mean(mse_loss(model->forward(b[0]), b[1]), b.size()); });
      if (step % read_every == 0) {
        result.loss();
      }
    }
  };
  EXPECT_EQ(reads_in([&] { train(1); }), 20);
  EXPECT_EQ(reads_in([&] { train(10); }), 2);
}

// The arithmetic of docs/fit.md.
TEST(Fit, ABlockOfAGptKeeps16NumbersForEachTokenAndUnitOfItsWidth) {
  const auto held = [](int64_t blocks) {
    Gpt model(GptOptions{.context = 64, .layers = blocks, .heads = 4, .width = 128});
    const Tensor tokens = torch::zeros({8, 64}, torch::kLong);
    const int64_t before = live_bytes(torch::kCPU).count();
    const Tensor logits = model->forward(tokens);
    return live_bytes(torch::kCPU).count() - before;
  };
  const double numbers = static_cast<double>(held(4) - held(2)) / (2.0 * 8 * 64 * 128 * 4);
  EXPECT_NEAR(numbers, 16, 0.25);  // besides, a few for each token: means, deviations, the attention's normaliser
}

}  // namespace
}  // namespace snug::mistakes_test
