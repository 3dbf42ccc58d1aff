// Updates of weights that wait in the host's memory, made by the next users of the weights.

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/stepper.h"
#include "src/memory/backward_pass.h"
#include "src/memory/cpu_allocator.h"
#include "src/memory/late_writes.h"
#include "src/optim/fused_optimizer_parts.h"
#include "src/step/places.h"
#include "src/step/trained_parameters.h"
#include "tests/accelerator/planned_on_device.h"
#include "tests/step/random_training.h"
#include "tests/support/model_on_device.h"
#include "tests/support/optimizer_kinds.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::late_update_test {
namespace {

using testing::bits_of;
using testing::clones_of;
using ::testing::HasSubstr;
using torch::Tensor;
using namespace testing::planned_on_device;

constexpr int64_t kWide = 256, kLayers = 6;
constexpr int64_t kWeight = 4 * kWide * kWide;
// The host takes as long to update a weight as the link to copy the weight.
constexpr double kUpdate = static_cast<double>(kWeight) / sim_device::kBytesPerSecond;

// Six weights of 256 KiB between two of 32 KiB, which never leave.
nn::Sequential layers() {
  return on_device(testing::make_mlp({32, kWide, kWide, kWide, kWide, kWide, kWide, kWide, 32}));
}

// Updates take virtual time of the host, and are counted.
class TimedAdamW final : public AdamW {
 public:
  using AdamW::AdamW;
  int64_t updated() const { return *updated_; }

 protected:
  std::function<void()> prepare(const Work& work) const override {
    int64_t elements = 0;
    for (const Tensor& parameter : work.parameters) {
      elements += parameter.numel();
    }
    return [update = AdamW::prepare(work), elements, updated = updated_, tick = tick_] {
      update();
      const sim_device::HostPace works(kUpdate * static_cast<double>(elements) / (kWide * kWide));
      tick.zero_();
      *updated += elements;
    };
  }

 private:
  Tensor tick_ = torch::zeros({1}, sim_device::device());
  std::shared_ptr<int64_t> updated_ = std::make_shared<int64_t>(0);
};

// A training with weights, gradients and state on the host. After a step, nothing is on the device but small weights.
template <class Optimizer>
struct Outside {
  nn::Sequential model;
  Optimizer optimizer{model->parameters(), {.lr = 0.01}};
  Stepper stepper;

  explicit Outside(StepperOptions with = {}, nn::Sequential of = layers())
      : model(std::move(of)), stepper(model, optimizer, outside(with)) {}
  static StepperOptions outside(StepperOptions with) {
    with.micro_batch = 16;
    with.budget = {.memory = Bytes(live() + 5 * kWeight), .offload = std::filesystem::path()};
    return with;
  }
  StepResult step(const Batch& batch) {
    return stepper.step(batch, [this](const Batch& micro) {
      return Loss::sum((model->forward(micro[0]) - micro[1]).pow(2).sum(), micro[1].numel());
    });
  }
};

class LateUpdate : public ::testing::Test {
  void SetUp() override { SNUG_SKIP_UNLESS_SIMULATED(); }
};

// Of four steps. A state_dict() makes all updates at once, as if there were no late updates. The last step has no
// forward pass after it.
template <class Optimizer>
double seconds_of_steps(bool at_once) {
  const Batch batch = device_batch(16);
  Outside<Optimizer> run;
  run.step(batch);
  (void)run.optimizer.state_dict();
  const double began = sim_device::virtual_seconds();
  for (int step = 1; step <= 4; ++step) {
    run.step(batch);
    if (at_once || step == 4) {
      (void)run.optimizer.state_dict();
    }
  }
  return sim_device::virtual_seconds() - began;
}

// In forward the host updates a weight while the weight before is copied and used. So of three steps' updates the first
// weight's are not hidden.
TEST_F(LateUpdate, IsHiddenByTheNextForwardPass) {
  const double saved = seconds_of_steps<TimedAdamW>(/*at_once=*/true) - seconds_of_steps<TimedAdamW>(/*at_once=*/false);
  EXPECT_GE(saved, 3 * (kLayers - 2) * kUpdate);
  EXPECT_LE(saved, 3 * kLayers * kUpdate);
}

TEST_F(LateUpdate, ComesWithTheFirstUserOfAWeightAlone) {
  const Batch batch = device_batch(16);
  Outside<TimedAdamW> run;
  run.step(batch);
  (void)run.optimizer.state_dict();
  const int64_t before = run.optimizer.updated();
  int64_t all = 0;
  for (const Tensor& parameter : run.model->parameters()) {
    all += parameter.numel();
  }
  run.step(batch);
  const auto updated = [&] { return run.optimizer.updated() - before; };
  const int64_t now = all - kLayers * kWide * kWide;
  EXPECT_EQ(updated(), now) << "small weights stay on the device";
  const std::vector<Tensor> parameters = run.model->parameters();
  ASSERT_EQ(parameters[8].nbytes(), static_cast<size_t>(kWeight));
  (void)parameters[8].sum();
  EXPECT_EQ(updated(), now + kWide * kWide);
  (void)parameters[8].cpu();
  EXPECT_EQ(updated(), now + kWide * kWide) << "once";
  std::vector<int64_t> in_forward;
  run.stepper.step(batch, [&](const Batch& micro) {
    Tensor hidden = micro[0];
    for (auto& layer : *run.model) {
      hidden = layer.forward(hidden);
      in_forward.push_back((updated() - now) / (kWide * kWide));
    }
    return Loss::sum((hidden - micro[1]).pow(2).sum(), micro[1].numel());
  });
  ASSERT_EQ(in_forward.size(), 15U) << "seven activations between eight layers";
  EXPECT_EQ(std::vector<int64_t>({in_forward[0], in_forward[2], in_forward[4], in_forward[6], in_forward[14]}),
            std::vector<int64_t>({1, 2, 3, 4, 6}))
      << "in the order of forward";
}

TEST_F(LateUpdate, HasTheOptionsOfItsStep) {
  const Batch batch = device_batch(16);
  const auto train = [&](auto&& run) {
    for (int step = 0; step < 3; ++step) {
      run.step(batch);
      static_cast<torch::optim::AdamWOptions&>(run.optimizer.param_groups()[0].options()).lr(0.05 * step);
    }
    return bits_of(clones_of(run.model->parameters()));
  };
  EXPECT_TRUE(train(Outside<AdamW>()) == train(PlannedTraining({.micro_batch = 16}, layers())));
}

TEST_F(LateUpdate, ComesBeforeAnOperatorUsesTheState) {
  const Batch batch = device_batch(16);
  for (const bool writes : {false, true}) {
    const auto train = [&](auto&& run) {
      run.step(batch);
      const std::vector<Tensor> state = run.optimizer.state_tensors();
      run.step(batch);
      for (const Tensor& tensor : state) {
        writes&& tensor.dim() > 0 ? (void)tensor.mul_(0.5) : void();
      }
      const std::string bits = bits_of(clones_of(state));  // before the weights
      return bits + bits_of(clones_of(run.model->parameters()));
    };
    EXPECT_TRUE(train(Outside<AdamW>()) == train(PlannedTraining({.micro_batch = 16}, layers()))) << writes;
  }
}

// A gradient is in the memory of the last step's gradient, unless the program has the last step's gradient.
TEST_F(LateUpdate, LeavesGradientsToTheProgram) {
  const Batch batch = device_batch(16);
  const auto train = [&](auto&& run, bool is_outside, bool holds, bool clears) {
    std::vector<Tensor> held;
    const void* place = nullptr;
    for (int step = 0; step < 3; ++step) {
      run.step(batch);
      const Tensor gradient = run.model->parameters()[2].grad();
      if (const void* const before = std::exchange(place, gradient.const_data_ptr()); before != nullptr && is_outside) {
        EXPECT_EQ(place == before, !holds) << step;
      }
      if (holds) {
        held.push_back(gradient);
      }
      if (clears) {
        run.optimizer.zero_grad(/*set_to_none=*/false);
      }
    }
    return bits_of(clones_of(held)) + bits_of(clones_of(run.model->parameters()));
  };
  for (const bool holds : {false, true}) {
    for (const bool clears : {false, true}) {
      EXPECT_TRUE(train(Outside<AdamW>(), true, holds, clears) ==
                  train(PlannedTraining({.micro_batch = 16}, layers()), false, holds, clears))
          << holds << clears;
    }
  }
}

// A 16-bit weight is rounded from the weight's master after the master's late update, and before others use either.
TEST_F(LateUpdate, OfAMasterComesBeforeTheProgramUsesMasterOrWeight) {
  const Batch batch = device_batch(16);
  const StepperOptions in_low{.precision = Precision::BFloat16, .weights = Weights::Low, .micro_batch = 16};
  const auto low_layers = [] {
    nn::Sequential model = layers();
    model->to(torch::kBFloat16);
    return model;
  };
  for (const std::string use : {"", "read weight", "read master", "write weight", "write master", "read state"}) {
    SCOPED_TRACE(use);
    const auto train = [&](auto&& run, bool is_outside) {
      std::string bits;
      for (int step = 0; step < 4; ++step) {
        run.step(batch);
        const Tensor low = run.model->parameters()[4].detach();
        const Tensor master = run.optimizer.param_groups()[0].params()[4].detach();
        EXPECT_NE(low.scalar_type(), master.scalar_type());
        EXPECT_EQ(detail::has_late_writes(low.storage()), is_outside);
        if (use.starts_with("write")) {
          (use == "write weight" ? low : master).mul_(0.5);
        } else if (use == "read state") {
          bits += bits_of(testing::tensors_in(run.stepper.state_dict()));
        }
        if (use != "" && use != "read state") {
          bits += use == "read master" ? bits_of({master.cpu()}) : bits_of({low.cpu()});
        }
      }
      return bits + bits_of(clones_of(run.model->parameters())) +
             bits_of(testing::tensors_in(run.stepper.state_dict()));
    };
    EXPECT_TRUE(train(Outside<AdamW>(in_low, low_layers()), true) ==
                train(PlannedTraining(in_low, low_layers()), false));
  }
}

std::string bits_after(const std::string& change, bool at_once) {
  const Batch batch = device_batch(16);
  PlannedTraining other({.micro_batch = 16}, layers());
  other.step(batch);
  Outside<AdamW> run;
  run.step(batch);
  run.step(batch);
  if (at_once) {
    (void)run.optimizer.state_dict();
  }
  if (change == "load") {
    run.optimizer.load_state_dict(other.optimizer.state_dict());
  } else if (change == "clear") {
    run.optimizer.state().clear();
  } else {
    (void)(change == "bring back" && run.optimizer.keep_state_in(StateOnDevice{}));
    (void)run.optimizer.keep_state_in(StateOnHost{.window = Bytes(192 << 10)});  // from here on in pieces
  }
  run.step(batch);
  return bits_of(clones_of(run.model->parameters())) + bits_of(testing::tensors_in(run.optimizer.state_dict()));
}

TEST_F(LateUpdate, ComesBeforeTheProgramReplacesTheState) {
  for (const std::string change : {"load", "move", "bring back", "clear"}) {
    EXPECT_TRUE(bits_after(change, false) == bits_after(change, true)) << change;
  }
}

TEST_F(LateUpdate, ComesAtTheEndOfTheStepper) {
  const auto train = [batch = device_batch(16)](auto run) {
    run->step(batch);
    const std::vector<Tensor> parameters = run->model->parameters();
    run.reset();
    return bits_of(clones_of(parameters));
  };
  EXPECT_TRUE(train(std::make_unique<Outside<AdamW>>()) ==
              train(std::make_unique<PlannedTraining>(StepperOptions{.micro_batch = 16}, layers())));
}

// Of the updates that are made while `fails`.
class FailingAdamW final : public AdamW {
 public:
  using AdamW::AdamW;
  std::shared_ptr<bool> fails = std::make_shared<bool>(false);
  std::shared_ptr<int> calls = std::make_shared<int>(0);

 protected:
  std::function<void()> prepare(const Work& work) const override {
    return [update = AdamW::prepare(work), fails = fails, calls = calls] {
      ++*calls;
      *fails ? throw std::bad_alloc() : update();
    };
  }
};

TEST_F(LateUpdate, IsThrownAtTheNextCallIfItFails) {
  const Batch batch = device_batch(16);
  const auto message_of = [](const auto& call) { return testing::error_of<Error>(call); };
  for (const std::string call : {"operator", "state", "step"}) {
    SCOPED_TRACE(call);
    Outside<FailingAdamW> run;
    run.step(batch);
    const std::vector<Tensor> parameters = run.model->parameters();
    const StateDict state = run.optimizer.state_dict();
    const std::vector<Tensor> before = clones_of(parameters);
    run.step(batch);
    *run.optimizer.fails = true;
    EXPECT_THAT(message_of([&] {
                  call == "operator" ? (void)parameters[4].sum()
                  : call == "state"  ? (void)run.optimizer.state_dict()
                                     : (void)run.step(batch);
                }),
                HasSubstr("AdamW.step: the update has stopped midway"));
    *run.optimizer.fails = false;
    EXPECT_THAT(message_of([&] { run.step(batch); }), HasSubstr("midway")) << "until a state is loaded";
    EXPECT_TRUE(bits_of(clones_of(parameters)) != bits_of(before)) << "weights that are updated at once";
    run.optimizer.load_state_dict(state);
    run.step(batch);
  }
}

TEST_F(LateUpdate, NeverComesAfterTheEndOfTheOptimizer) {
  auto run = std::make_unique<Outside<FailingAdamW>>();
  run->step(device_batch(16));
  *run->optimizer.fails = true;
  const std::vector<Tensor> parameters = run->model->parameters();
  const auto calls = run->optimizer.calls;
  const int before = *calls;
  run.reset();
  EXPECT_EQ(*calls, before + 1) << "one fails, and ends the updates";
  (void)clones_of(parameters);
  EXPECT_EQ(*calls, before + 1);
}

// --- any model, optimizer and order of calls

testing::RandomModel model_of(uint64_t seed, const testing::Kind& kind) {
  testing::RandomModel model = testing::model_on_device(seed);
  model.module->to(kind.dtype);
  if (model.input.is_floating_point()) {
    model.input = model.input.detach().to(kind.dtype).requires_grad_(model.input.requires_grad());
  }
  return model;
}

// Before and after each update the program reads or writes weights, gradients or state, or does nothing.
std::string trained_bits(uint64_t seed, const testing::Kind& kind, bool is_outside) {
  const testing::RandomModel model = model_of(seed, kind);
  std::vector<Tensor> trained = model.leaves();
  std::erase_if(trained, [&](const Tensor& leaf) { return leaf.is_same(model.input); });
  const auto optimizer = kind.make(trained);
  optimizer->keep_state_in(StateOnHost{});
  detail::TrainedParameters parameters(*model.module, *optimizer);
  detail::ModelPlace place(*model.module, parameters, std::filesystem::path());
  if (is_outside) {
    place.put(Place::Host);
    EXPECT_EQ(place.place(), Place::Host);
  }
  std::string bits;
  std::vector<Tensor> state;  // with the values of now
  std::minstd_rand random(static_cast<unsigned>(seed) + 1);
  for (int step = 0; step < 5; ++step) {
    parameters.drop_gradients();
    place.begin();
    torch::manual_seed(step);
    detail::go_backward(model.loss(model.input));
    place.end();
    const Tensor& some = trained[random() % trained.size()];
    if (step % 2 == 1) {
      optimizer->before_writing([&] { bits += bits_of({some.detach().cpu()}); });
    }
    optimizer->step();
    switch (random() % 7) {
      case 0:
        bits += bits_of({some.detach().cpu()});
        break;
      case 1:
        state = optimizer->state_tensors();
        bits += bits_of(clones_of(state));
        break;
      case 2:
        some.detach().mul_(0.5);
        break;
      case 3:
        bits += bits_of({model.loss(model.input).detach().cpu()});
        break;
      case 4:
        optimizer->zero_grad(/*set_to_none=*/false);
        break;
      case 5:
        bits += bits_of(clones_of(state));
        break;
      default:
        break;
    }
  }
  return bits + bits_of(clones_of(model.module->parameters())) + bits_of(testing::tensors_in(optimizer->state_dict()));
}

TEST_F(LateUpdate, HasTheBitsOfAnUpdateAtOnceInRandomModels) {
  const testing::random_training::InFileFrom small(256);
  const std::vector<testing::Kind> kinds = testing::kinds();
  std::map<torch::ScalarType, int> trained;
  for (uint64_t seed = 0; seed < 80; ++seed) {
    const testing::Kind& kind = kinds[seed % kinds.size()];
    const testing::RandomModel model = model_of(seed, kind);
    SCOPED_TRACE(model.description);
    if (!testing::runs_on_device(model) || model.leaves().empty()) {
      continue;
    }
    ++trained[kind.dtype];
    EXPECT_TRUE(trained_bits(seed, kind, true) == trained_bits(seed, kind, false)) << kind.name;
  }
  EXPECT_GT(trained[torch::kFloat], 10);
  EXPECT_GT(trained[torch::kBFloat16], 5);
}

}  // namespace
}  // namespace snug::late_update_test
