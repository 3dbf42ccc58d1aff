#include "snug/stepper.h"

#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/autocast.h"
#include "snug/clip.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "tests/step/adamw_training.h"

// The bits of a step, its result, and the models and batches that it takes.

namespace snug::stepper_test {
namespace {

using testing::AdamWTraining;
using testing::clones_of;
using testing::close_in_norm;
using testing::everything;
using testing::gradients_of;
using testing::make_mlp;
using testing::regression_batch;
using testing::same_bits;
using testing::squared_error;
using testing::tiny_batch;
using testing::tiny_model;
using torch::Tensor;

struct SgdTraining {
  explicit SgdTraining(StepperOptions options = {})
      : model(tiny_model()),
        optimizer(model->parameters(), torch::optim::SGDOptions(0.1)),
        stepper(model, optimizer, options) {}

  StepResult step(const Batch& batch) {
    return stepper.step(batch, [&](const Batch& micro) { return squared_error(model->forward(micro[0]), micro[1]); });
  }
  std::vector<torch::Tensor> parameters() { return clones_of(model->parameters()); }

  torch::nn::Sequential model;
  torch::optim::SGD optimizer;
  Stepper stepper;
};

// --- bits

TEST(StepperBits, OfOneMicroBatchAreThoseOfThePlainLoopWithAutocastAndClippingToo) {
  const Batch batch = regression_batch(8);
  for (const auto& [precision, clip_norm] :
       {std::pair{Precision::Float32, 0.0}, {Precision::Float32, 0.5}, {Precision::BFloat16, 0.5}}) {
    AdamWTraining run({.precision = precision, .clip_norm = clip_norm});
    auto model = make_mlp({6, 16, 3});
    AdamW optimizer(model->parameters(), {.lr = 0.01});
    for (int step = 0; step < 4; ++step) {
      const auto result = run.step(batch);
      optimizer.zero_grad();
      Tensor loss;
      {
        std::optional<Autocast> autocast;
        if (precision == Precision::BFloat16) {
          autocast.emplace(torch::kCPU, torch::kBFloat16);
        }
        loss = (model->forward(batch[0]).to(torch::kFloat) - batch[1]).pow(2).sum() /
               static_cast<double>(batch[1].numel());
      }
      loss.backward();
      const Tensor norm =
          clip_norm > 0 ? clip_grad_norm_(model->parameters(), clip_norm) : grad_norm(model->parameters());
      optimizer.step();
      EXPECT_EQ(static_cast<float>(result.loss()), loss.item<float>());
      EXPECT_EQ(result.grad_norm(), norm.item<float>());
      ASSERT_TRUE(same_bits(run.state(), everything(model, optimizer))) << step;
      EXPECT_TRUE(same_bits(gradients_of(*run.model), gradients_of(*model))) << "gradients stay readable";
    }
  }
}

// Each of the 100 gradients is a sum of at most 12 * 2 products' terms in another order. A sum of n terms carries a
// relative error of at most (n - 1) u of the sum of magnitudes, u = 2^-24 (Higham 2002, section 4.2): here 2.8e-6 for
// both orders together. The weights move by at most lr = 0.1 times that per step, and gradient descent on this small
// problem does not amplify: 100 * 0.1 * 2.8e-6.
TEST(Stepper, SplitsEqualTheFullBatchAfter100StepsOfSgd) {
  const Batch batch = tiny_batch(12);
  SgdTraining whole;
  for (int i = 0; i < 100; ++i) {
    whole.step(batch);
  }
  for (const int64_t size : {1, 4, 5, 11}) {
    SgdTraining run({.micro_batch = size});
    for (int i = 0; i < 100; ++i) {
      const auto result = run.step(batch);
      EXPECT_EQ(result.micro_batches, (12 + size - 1) / size);
      EXPECT_EQ(result.items, 24);
    }
    EXPECT_TRUE(close_in_norm(run.parameters(), whole.parameters(), 2.8e-5)) << "micro-batches of " << size;
  }
}

// A module that is registered twice: parameters() names its tensors twice, and there is one gradient.
struct SharedImpl : torch::nn::Module {
  torch::nn::Linear layer{6, 6};
  SharedImpl() {
    register_module("first", layer);
    register_module("second", layer);
  }
  Tensor forward(const Tensor& x) { return layer->forward(layer->forward(x).tanh()); }
};
TORCH_MODULE(Shared);

TEST(Stepper, TrainsASharedModuleAsOne) {
  torch::manual_seed(3);
  const Batch batch{torch::randn({5, 6}), torch::randn({5, 6})};
  torch::manual_seed(4);
  Shared model;
  torch::manual_seed(4);
  auto layer = torch::nn::Linear(6, 6);
  AdamW optimizer(model->parameters(), {.lr = 0.1});
  AdamW reference(layer->parameters(), {.lr = 0.1});
  Stepper stepper(model, optimizer, {.clip_norm = 0.1});
  for (int step = 0; step < 3; ++step) {
    stepper.step(batch, [&](const Batch& micro) {
      return Loss::sum((model->forward(micro[0]) - micro[1]).pow(2).sum(), micro[1].numel());
    });
    reference.zero_grad();
    ((layer->forward(layer->forward(batch[0]).tanh()) - batch[1]).pow(2).sum() / 30.0).backward();
    clip_grad_norm_(layer->parameters(), 0.1);
    reference.step();
  }
  EXPECT_TRUE(same_bits(clones_of(model->layer->parameters()), clones_of(layer->parameters())));
}

// --- the result

TEST(StepperResult, ReportsTheStep) {
  const Batch batch = tiny_batch(12);
  SgdTraining run({.micro_batch = 4, .clip_norm = 1e-3});
  const auto before = run.parameters();
  const auto result = run.step(batch);
  EXPECT_TRUE(result.stepped());
  EXPECT_GT(result.grad_norm(), 1e-3);
  EXPECT_EQ(result.scale(), 1.0);
  EXPECT_GT(result.peak_bytes, 0);
  EXPECT_EQ(result.bytes_sent, 0);
  auto reference = tiny_model();
  const double loss = torch::mse_loss(reference->forward(batch[0]), batch[1]).item<double>();
  EXPECT_NEAR(result.loss(), loss, 1e-6);
  double moved = 0;
  const auto after = run.parameters();
  for (size_t i = 0; i < after.size(); ++i) {
    moved += (after[i] - before[i]).square().sum().item<double>();
  }
  EXPECT_NEAR(std::sqrt(moved), 0.1 * 1e-3, 1e-7);  // clipped to 1e-3, times the learning rate
}

TEST(StepperResult, WithoutClippingIsTheNormOfTheMeansGradient) {
  const Batch batch = regression_batch(9);
  AdamWTraining run({.micro_batch = 4});
  const auto result = run.step(batch);
  auto model = make_mlp({6, 16, 3});
  const Tensor loss = torch::mse_loss(model->forward(batch[0]), batch[1]);
  loss.backward();
  EXPECT_NEAR(result.grad_norm(), grad_norm(model->parameters()).item<double>(), 1e-6);
  EXPECT_NEAR(result.loss(), loss.item<double>(), 1e-6);
  EXPECT_EQ(result.micro_batches, 3);
  EXPECT_EQ(result.items, 27);
  EXPECT_GE(result.seconds, 0);
  EXPECT_EQ(result.bytes_sent, 0);
  EXPECT_GE(result.peak_bytes, live_bytes(torch::kCPU).count() - testing::bytes_of(run.state()));
}

TEST(StepperResult, PeakFallsWithTheMicroBatch) {
  const Batch batch = regression_batch(512);
  const auto activations = [&](int64_t micro_batch) {
    AdamWTraining run({.micro_batch = micro_batch});
    run.step(batch);  // makes the optimizer's state
    const int64_t before = live_bytes(torch::kCPU).count();
    return run.step(batch).peak_bytes - before;
  };
  EXPECT_LT(activations(32), activations(0) / 4);
}

TEST(Stepper, SkipsAStepWithoutItems) {
  SgdTraining run;
  const auto before = run.parameters();
  const auto result = run.stepper.step(
      tiny_batch(4), [&](const Batch& micro) { return Loss::mean(run.model->forward(micro[0]).sum() * 0 / 0, 0); });
  EXPECT_FALSE(result.stepped());
  EXPECT_EQ(result.items, 0);
  EXPECT_TRUE(std::isnan(result.loss()));
  EXPECT_TRUE(same_bits(run.parameters(), before));
}

// --- gradients

// A run of `options` that leaves out its second update has, after the third step, the bits of one without the second.
void expect_left_out(StepperOptions options) {
  std::vector<std::pair<double, double>> asked;
  options.accept_update = [&](const StepResult& result) {
    asked.emplace_back(result.loss(), result.grad_norm());
    return asked.size() != 2;
  };
  AdamWTraining run(options);
  options.accept_update = {};
  AdamWTraining without(options);
  run.step(regression_batch(4));
  without.step(regression_batch(4));
  const auto before = run.state();
  const StepResult left_out = run.step(regression_batch(6));
  EXPECT_FALSE(left_out.stepped());
  EXPECT_EQ(asked.back(), std::pair(left_out.loss(), left_out.grad_norm()));
  EXPECT_TRUE(same_bits(run.state(), before));
  EXPECT_TRUE(run.step(regression_batch(4)).stepped());
  without.step(regression_batch(4));
  EXPECT_EQ(asked.size(), 3U);
  EXPECT_TRUE(same_bits(run.state(), without.state()));
  EXPECT_EQ(run.stepper.scaler().get_scale(), without.stepper.scaler().get_scale());
}

TEST(Stepper, LeavesOutAnUpdateThatIsNotAccepted) {
  expect_left_out({});
  expect_left_out({.micro_batch = 2, .clip_norm = 0.5});
  expect_left_out({.precision = Precision::Float16, .sixteen_bit = {.scaler = {.init_scale = 64}}});
}

TEST(Stepper, DoesNotAskAboutAnUpdateThatLossScalingLeavesOut) {
  bool is_asked = false;
  AdamWTraining run({.precision = Precision::Float16,
                     .sixteen_bit = {.scaler = {.init_scale = 64}},
                     .accept_update = [&](const StepResult&) {
                       is_asked = true;
                       return true;
                     }});
  run.stepper.step(regression_batch(4), [&](const Batch& micro) {
    const Loss loss = run.loss_of(micro);
    return Loss::sum(loss.value() * std::numeric_limits<float>::infinity(), loss.count());
  });
  EXPECT_FALSE(is_asked);
  EXPECT_EQ(run.stepper.scaler().get_scale(), 32.0);
}

TEST(Stepper, ZeroesAlsoTheGradientsThatTheOptimizerDoesNotKnow) {
  const Batch batch = regression_batch(4);
  auto model = make_mlp({6, 16, 3});
  torch::optim::SGD head(model->children().back()->parameters(), torch::optim::SGDOptions(0.0));  // lr 0: nothing moves
  Stepper stepper(model, head);
  const auto loss_of = [&](const Batch& micro) {
    return Loss::sum((model->forward(micro[0]) - micro[1]).pow(2).sum(), micro[1].numel());
  };
  const double first = stepper.step(batch, loss_of).grad_norm();
  EXPECT_EQ(stepper.step(batch, loss_of).grad_norm(), first);
}

TEST(Stepper, LeavesFrozenParametersAndTheirGradientsAlone) {
  AdamWTraining run;
  const Tensor frozen = run.model->parameters().front();
  frozen.set_requires_grad(false);
  Stepper stepper(run.model, run.optimizer);
  const Tensor before = frozen.detach().clone();
  const auto result = stepper.step(regression_batch(4), [&](const Batch& micro) { return run.loss_of(micro); });
  EXPECT_TRUE(result.stepped());
  EXPECT_TRUE(same_bits(frozen, before));
  EXPECT_FALSE(frozen.grad().defined());
}

// --- models, batches and options

TEST(Stepper, TakesHoldersModulesAndSharedPointersToThem) {
  const Batch batch = regression_batch(4);
  auto holder = make_mlp({6, 3});
  torch::nn::Module& module = *holder;
  auto pointer = holder.ptr();
  torch::optim::SGD optimizer(holder->parameters(), torch::optim::SGDOptions(0.1));
  const auto loss_of = [&](const Batch& micro) { return Loss::sum(holder->forward(micro[0]).sum(), micro.size()); };
  EXPECT_TRUE(Stepper(holder, optimizer).step(batch, loss_of).stepped());
  EXPECT_TRUE(Stepper(module, optimizer).step(batch, loss_of).stepped());
  EXPECT_TRUE(Stepper(pointer, optimizer).step(batch, loss_of).stepped());
}

struct Sentences {  // a batch type of one's own, without to()
  std::vector<Tensor> rows;

  int64_t size() const { return static_cast<int64_t>(rows.size()); }
  Sentences slice(int64_t begin, int64_t end) const { return {{rows.begin() + begin, rows.begin() + end}}; }
};

TEST(Stepper, TakesBatchTypesOfOnesOwn) {
  Sentences batch;
  for (int64_t i = 0; i < 5; ++i) {
    batch.rows.push_back(torch::full({i + 1, 6}, 0.1 * static_cast<double>(i)));
  }
  AdamWTraining run({.micro_batch = 2});
  std::vector<int64_t> sizes;
  const auto result = run.stepper.step(batch, [&](const Sentences& micro) {
    sizes.push_back(micro.size());
    const Tensor rows = torch::cat(micro.rows);
    return Loss::sum(run.model->forward(rows).pow(2).sum(), rows.size(0));
  });
  EXPECT_EQ(sizes, (std::vector<int64_t>{2, 2, 1}));
  EXPECT_EQ(result.items, 1 + 2 + 3 + 4 + 5);
  EXPECT_TRUE(result.stepped());
}

// A batch type of one's own, standing for one that lies on another device: to() copies, and counts what is alive.
int64_t most_alive = 0;
int64_t now_alive = 0;
struct Counted {
  torch::Tensor x;
  std::shared_ptr<int64_t> alive;

  int64_t size() const { return x.size(0); }
  Counted slice(int64_t begin, int64_t end) const { return {x.slice(0, begin, end), nullptr}; }
  Counted to(c10::Device) const {
    most_alive = std::max(most_alive, ++now_alive);
    return {x.clone(), {new int64_t, [](int64_t* p) {
                          --now_alive;
                          delete p;
                        }}};
  }
};

TEST(Stepper, HoldsOnlyTheCurrentAndTheNextMicroBatchOnTheDevice) {
  auto model = tiny_model();
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  Stepper stepper(model, optimizer, {.micro_batch = 100});
  const Counted batch{torch::randn({1000, 6}), nullptr};
  const int64_t before = live_bytes(torch::kCPU).count();
  int64_t most_bytes = 0;
  int64_t seen = 0;
  most_alive = now_alive = 0;
  stepper.step(batch, [&](const Counted& micro) {
    most_bytes = std::max(most_bytes, live_bytes(torch::kCPU).count() - before);
    seen += micro.x.size(0);
    return Loss::sum(model->forward(micro.x.narrow(0, 0, 1)).sum(), 1);
  });
  EXPECT_EQ(seen, 1000);
  EXPECT_EQ(most_alive, 2);
  EXPECT_EQ(now_alive, 0);
  const int64_t micro_bytes = 100 * 6 * 4;
  int64_t gradients = 0;
  for (const auto& p : model->parameters()) {
    gradients += p.numel() * 4;
  }
  EXPECT_LE(most_bytes, 2 * micro_bytes + gradients + 64);  // and a few scalars of loss arithmetic
}

TEST(Stepper, NeverSplitsAWhole) {
  const auto whole = [](SgdTraining& run) {
    return
        [&run](const Batch& micro) { return Loss::whole((run.model->forward(micro[0]) - micro[1]).square().mean()); };
  };
  SgdTraining run;
  EXPECT_TRUE(run.stepper.step(tiny_batch(4), whole(run)).stepped());
  SgdTraining split({.micro_batch = 2});
  EXPECT_THROW(split.stepper.step(tiny_batch(4), whole(split)), ConfigError);
  EXPECT_TRUE(split.stepper.step(tiny_batch(2), whole(split)).stepped()) << "the micro-batch is the whole batch";
  SgdTraining accumulated({.accumulate = {.every = 2}});
  EXPECT_THROW(accumulated.stepper.accumulate(tiny_batch(4), whole(accumulated)), ConfigError);
}

TEST(Stepper, RefusesOptionsThatCannotWork) {
  auto model = tiny_model();
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  EXPECT_THROW(Stepper(model, optimizer, {.micro_batch = -1}), ConfigError);
  EXPECT_THROW(Stepper(model, optimizer, {.accumulate = {.every = 0}}), ConfigError);
  EXPECT_THROW(Stepper(model, optimizer, {.accumulate = {.every = int64_t{1} << 62}}), ConfigError)
      << "its items overflow";
  EXPECT_THROW(Stepper(model, optimizer, {.clip_norm = -1}), ConfigError);
  torch::nn::Sequential empty{torch::nn::Tanh()};
  EXPECT_THROW(Stepper(empty, optimizer), ConfigError);
}

}  // namespace
}  // namespace snug::stepper_test
