// What a Stepper does with an optimizer that tells little of itself, or that has one interface of snug/optimizer.h
// alone.

#include "src/core/optimizer_capabilities.h"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/optimizer.h"
#include "snug/stepper.h"
#include "tests/support/small_models.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

namespace snug::optimizer_capabilities_test {
namespace {

namespace optim = torch::optim;
using testing::bytes_of;
using testing::clones_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::same_bits;
using testing::tiny_batch;
using testing::tiny_model;
using torch::Tensor;
using Parameters = std::vector<Tensor>;

// Hands gradients on, as a program does that has an optimizer for each of its tensors. Has torch's options all the
// same.
struct Several : optim::Optimizer {
  std::vector<std::unique_ptr<optim::Adam>> all;

  explicit Several(const Parameters& parameters) : Optimizer(parameters, std::make_unique<optim::AdamOptions>()) {
    for (const Tensor& parameter : parameters) {
      all.push_back(std::make_unique<optim::Adam>(Parameters{parameter}, 1e-3));
    }
  }
  Tensor step(LossClosure /*closure*/ = nullptr) override {
    for (auto& optimizer : all) {
      optimizer->step();
    }
    return {};
  }
};

struct SeveralWithState : Several, StatefulOptimizer {
  using Several::Several;
  StateDict state_dict() const override { return {}; }
  void load_state_dict(const StateDict& /*state*/) override {}
};

TEST(OptimizerCapabilities, StateThatAnotherOptimizerHasIsNotCountedAsToCome) {
  const Parameters parameters{torch::ones({100}).requires_grad_()};
  const Several several(parameters);
  EXPECT_EQ(detail::state_bytes_to_come(several), 0);
  EXPECT_FALSE(detail::knows_state_to_come(several));
  EXPECT_FALSE(detail::knows_state_to_come(SeveralWithState(parameters)));
  EXPECT_TRUE(detail::knows_state_to_come(AdamW(parameters)));
}

// Gradients fit, but not the state that the first update makes.
TEST(OptimizerCapabilities, AnUpdateThatMakesStateNobodyKnewOfIsNotLeftHalfMade) {
  const Batch batch{torch::ones({2, 256}), torch::ones({2, 256})};
  const auto train = [&](bool limited) {
    auto model = testing::make_mlp({256, 256, 256});
    Several optimizer(model->parameters());
    int64_t weights = 0;
    for (const Tensor& parameter : model->parameters()) {
      weights += static_cast<int64_t>(parameter.nbytes());
    }
    StepperOptions options;
    if (limited) {
      options.budget.memory = Bytes(live_bytes(torch::kCPU).count() + 14 * weights / 5);
    }
    Stepper stepper(model, optimizer, options);
    const auto loss_of = [&](const Batch& micro) { return testing::squared_error(model->forward(micro[0]), micro[1]); };
    EXPECT_TRUE(stepper.step(batch, loss_of).stepped());
    auto after = clones_of(model->parameters());
    if (limited) {
      EXPECT_THROW(stepper.step(batch, loss_of), BudgetExceeded) << "by now it is known";
      EXPECT_TRUE(same_bits(clones_of(model->parameters()), after));
    }
    return after;
  };
  EXPECT_TRUE(same_bits(train(true), train(false)));
}

// An optimizer of a program's own, without an interface.
struct OwnSgd : optim::Optimizer {
  int64_t scratch_bytes = 0;  // in memory during an update, and told to nobody
  int updates = 0;

  explicit OwnSgd(const Parameters& parameters)
      : Optimizer(parameters, std::make_unique<optim::SGDOptions>(/*lr=*/0.1)) {}
  Tensor step(LossClosure /*closure*/ = nullptr) override {
    const torch::NoGradGuard no_grad;
    const Tensor scratch = torch::empty({scratch_bytes}, torch::kUInt8);
    begin_writing();
    ++updates;
    for (const Tensor& parameter : param_groups()[0].params()) {
      parameter.sub_(parameter.grad(), 0.1);
    }
    return {};
  }
  virtual void begin_writing() {}
};

Loss loss_of(torch::nn::Sequential& model, const Batch& micro) {
  const auto dtype = model->parameters()[0].scalar_type();
  return testing::squared_error(model->forward(micro[0].to(dtype)), micro[1]);
}

// --- UpdateAware alone

struct Promising : OwnSgd, UpdateAware {
  std::vector<std::string> names;
  std::function<void()> hook;
  int hooks = 0;  // called

  using OwnSgd::OwnSgd;
  bool takes(c10::ScalarType dtype) const override { return dtype == torch::kBFloat16 || UpdateAware::takes(dtype); }
  bool before_writing(std::function<void()> given) override {
    hook = std::move(given);
    return true;
  }
  void name_parameters(const std::vector<std::pair<std::string, Tensor>>& all) override {
    names.clear();
    for (const auto& [name, parameter] : all) {
      names.push_back(name);
    }
  }
  void begin_writing() override {
    if (hook) {
      std::exchange(hook, {})();
      ++hooks;
    }
  }
};

TEST(OptimizerCapabilities, UpdateAwareAloneTrains16BitParametersAndGetsTheirNames) {
  auto model = tiny_model();
  model->to(torch::kBFloat16);
  OwnSgd plain(model->parameters());
  EXPECT_THAT(error_of<ConfigError>([&] { Stepper(model, plain); }), HasSubstr("Weights::Low"));
  Promising optimizer(model->parameters());
  Stepper stepper(model, optimizer);
  const auto before = clones_of(model->parameters());
  EXPECT_TRUE(stepper.step(tiny_batch(8), [&](const Batch& micro) { return loss_of(model, micro); }).stepped());
  EXPECT_FALSE(same_bits(clones_of(model->parameters()), before));
  EXPECT_THAT(optimizer.names,
              ::testing::ElementsAre("0.weight", "0.bias", "3.weight", "3.bias", "5.weight", "5.bias"));
  EXPECT_EQ(optimizer.hooks, 1);
}

// An optimizer that promises nothing may have written some parameters when memory runs out.
TEST(OptimizerCapabilities, UpdateAwareAloneUpdatesWithinTheBudgetOrNotAtAllAndWithoutItTheUpdateHasNoLimit) {
  const auto train = [](auto& model, auto& optimizer, int64_t scratch_bytes) {
    optimizer.scratch_bytes = scratch_bytes;
    Stepper stepper(model, optimizer, {.budget = {.memory = Bytes(live_bytes(torch::kCPU).count() + (1 << 20))}});
    return stepper.step(tiny_batch(8), [&](const Batch& micro) { return loss_of(model, micro); }).stepped();
  };
  constexpr int64_t kMuch = 4 << 20;
  auto model = tiny_model();
  const auto before = clones_of(model->parameters());
  Promising promising(model->parameters());
  EXPECT_THROW(train(model, promising, kMuch), BudgetExceeded);
  EXPECT_EQ(promising.updates, 0);
  EXPECT_TRUE(same_bits(clones_of(model->parameters()), before));
  EXPECT_TRUE(train(model, promising, 0));
  EXPECT_EQ(promising.hooks, 1);

  OwnSgd plain(model->parameters());
  EXPECT_TRUE(train(model, plain, kMuch));
  EXPECT_EQ(plain.updates, 1);
}

// Such an optimizer asks the other ranks in step() itself, so the Stepper begins to write before step().
TEST(OptimizerCapabilities, UpdateAwareAloneGetsNoHookWhereItAgreesAcrossRanksItself) {
  struct Agreeing : Promising {
    using Promising::Promising;
    bool agrees_across_ranks() const override { return true; }
  };
  auto model = tiny_model();
  Agreeing optimizer(model->parameters());
  Stepper stepper(model, optimizer);
  EXPECT_TRUE(stepper.step(tiny_batch(8), [&](const Batch& micro) { return loss_of(model, micro); }).stepped());
  EXPECT_EQ(optimizer.hooks, 0);
}

// --- GradientScalingAware alone

struct Skipping : OwnSgd, GradientScalingAware {
  Tensor grad_scale, found_inf;
  int calls = 0;
  bool divides = false;  // whether any step was to divide gradients

  using OwnSgd::OwnSgd;
  void set_gradient_scaling(Tensor scale, Tensor found) override {
    grad_scale = std::move(scale);
    found_inf = std::move(found);
  }
  Tensor step(LossClosure /*closure*/ = nullptr) override {
    ++calls;
    divides = divides || grad_scale.defined();
    return std::exchange(found_inf, {}).item<float>() == 1 ? Tensor() : OwnSgd::step();
  }
};

TEST(OptimizerCapabilities, GradientScalingAwareAloneSkipsStepsItselfAndGetsGradientsThatAreUnscaled) {
  const auto train = [](auto& model, auto& optimizer) {
    Stepper stepper(model, optimizer,
                    {.precision = Precision::Float16, .sixteen_bit = {.scaler = {.init_scale = 1024}}});
    std::vector<bool> stepped;
    for (const float factor : {1.0f, std::numeric_limits<float>::infinity(), 1.0f}) {
      const StepResult result = stepper.step(tiny_batch(8), [&](const Batch& micro) {
        return testing::squared_error(model->forward(micro[0]) * factor, micro[1]);
      });
      stepped.push_back(result.stepped());
    }
    return stepped;
  };
  auto model = tiny_model(), reference = tiny_model();
  Skipping skipping(model->parameters());
  OwnSgd plain(reference->parameters());
  EXPECT_THAT(train(model, skipping), ::testing::ElementsAre(true, false, true));
  EXPECT_THAT(train(reference, plain), ::testing::ElementsAre(true, false, true));
  EXPECT_TRUE(same_bits(clones_of(model->parameters()), clones_of(reference->parameters())));
  EXPECT_EQ(skipping.calls, 3);
  EXPECT_EQ(skipping.updates, 2);
  EXPECT_EQ(plain.updates, 2) << "the scaler leaves out the call";
  EXPECT_FALSE(skipping.divides) << "the Stepper unscales before it clips";
}

// --- MovableState alone

// Momentum, in tensors or, as if in a file, outside of tensor memory.
struct Moving : OwnSgd, MovableState {
  bool can_leave = true;
  bool is_contradictory = false;       // gives bytes for a file, and refuses the file
  std::vector<StatePlacement> places;  // all that were asked for

  explicit Moving(const Parameters& parameters) : OwnSgd(parameters) {
    for (const Tensor& parameter : parameters) {
      inside_.push_back(torch::zeros_like(parameter));
      outside_.emplace_back();
    }
  }
  Tensor step(LossClosure /*closure*/ = nullptr) override {
    const torch::NoGradGuard no_grad;
    ++updates;
    size_t i = 0;
    for (const Tensor& parameter : param_groups()[0].params()) {
      Tensor momentum = inside_[i].defined() ? inside_[i] : torch::from_blob(outside_[i].data(), parameter.sizes());
      parameter.sub_(momentum.mul_(0.9).add_(parameter.grad()), 0.01);
      ++i;
    }
    return {};
  }
  bool keep_state_in(const StatePlacement& place) override {
    places.push_back(place);
    if (!can_leave || is_contradictory) {
      return false;
    }
    size_t i = 0;
    for (const Tensor& parameter : param_groups()[0].params()) {
      if (std::holds_alternative<StateFile>(place)) {
        const float* values = inside_[i].const_data_ptr<float>();
        outside_[i].assign(values, values + inside_[i].numel());
        inside_[i].reset();
      } else {
        inside_[i] = torch::from_blob(outside_[i].data(), parameter.sizes()).clone();
      }
      ++i;
    }
    placement_ = place;
    return true;
  }
  StatePlacement state_placement() const override { return placement_; }
  PlacementBytes bytes_with_state_in(const StatePlacement& place) const override {
    const auto* file = std::get_if<StateFile>(&place);
    return file == nullptr || !can_leave
               ? PlacementBytes()
               : PlacementBytes{.moved = bytes_of(param_groups()[0].params()), .workspace = file->window.count()};
  }

 private:
  StatePlacement placement_;
  Parameters inside_;  // undefined: outside
  std::vector<std::vector<float>> outside_;
};

struct Moved {
  Parameters parameters;
  std::vector<StatePlacement> places;
  std::optional<StepPlan> plan;
};

// `room`: bytes of the budget above what is alive with the optimizer's state, in quarters of the weights.
Moved train_moving(int64_t room, std::optional<std::filesystem::path> offload, bool can_leave = true) {
  auto model = testing::make_mlp({32, 512, 512, 32});
  Moving optimizer(model->parameters());
  optimizer.can_leave = can_leave;
  torch::manual_seed(7);
  const Batch batch{torch::randn({4, 32}), torch::randn({4, 32})};
  const Bytes budget(live_bytes(torch::kCPU).count() + room * bytes_of(model->parameters()) / 4);
  Stepper stepper(model, optimizer, {.micro_batch = 4, .budget = {.memory = budget, .offload = std::move(offload)}});
  for (int step = 0; step < 3; ++step) {
    EXPECT_TRUE(stepper.step(batch, [&](const Batch& micro) { return loss_of(model, micro); }).stepped());
  }
  return {clones_of(model->parameters()), optimizer.places, stepper.plan()};
}

TEST(OptimizerCapabilities, MovableStateAloneIsMovedByThePlan) {
  constexpr int64_t kTight = 3, kAmple = 12;  // gradients take four quarters
  const testing::TemporaryFolder folder;
  const Moved plain = train_moving(kAmple, std::nullopt);
  EXPECT_TRUE(plain.places.empty()) << "without a directory the state stays";

  const Moved tight = train_moving(kTight, folder.path());
  ASSERT_TRUE(tight.plan);
  EXPECT_EQ(tight.plan->placement.state, Place::File);
  ASSERT_EQ(tight.places.size(), 1u);
  EXPECT_EQ(std::get<StateFile>(tight.places[0]).directory, folder.path());
  EXPECT_TRUE(same_bits(tight.parameters, plain.parameters));

  const Moved ample = train_moving(kAmple, folder.path());
  ASSERT_TRUE(ample.plan);
  EXPECT_EQ(ample.plan->placement.state, Place::Memory);
  ASSERT_EQ(ample.places.size(), 2u) << "outside while plans are tried";
  EXPECT_TRUE(std::holds_alternative<StateOnDevice>(ample.places[1]));
  EXPECT_TRUE(same_bits(ample.parameters, plain.parameters));
}

TEST(OptimizerCapabilities, MovableStateThatCannotLeaveStaysInMemory) {
  constexpr int64_t kAmple = 12;
  const testing::TemporaryFolder folder;
  const Moved stays = train_moving(kAmple, folder.path(), /*can_leave=*/false);
  ASSERT_TRUE(stays.plan);
  EXPECT_EQ(stays.plan->placement.state, Place::Memory);
  EXPECT_EQ(stays.plan->bytes.optimizer_state.outside, 0);
  EXPECT_TRUE(same_bits(stays.parameters, train_moving(kAmple, std::nullopt).parameters));
}

// The bytes of a plan would be wrong.
TEST(OptimizerCapabilities, MovableStateThatRefusesAPlaceForWhichItGivesBytesIsAnError) {
  const testing::TemporaryFolder folder;
  auto model = testing::make_mlp({32, 512, 32});
  Moving optimizer(model->parameters());
  optimizer.is_contradictory = true;
  const StepperOptions options{.budget = {.memory = Bytes(int64_t{1} << 30), .offload = folder.path()}};
  EXPECT_THAT(error_of<ConfigError>([&] { Stepper(model, optimizer, options); }),
              HasSubstr("keep_state_in returns false"));
}

}  // namespace
}  // namespace snug::optimizer_capabilities_test
