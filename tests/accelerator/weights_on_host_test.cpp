// Weights and gradients of a model on an accelerator that wait in the host's memory.

#include <algorithm>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/ScopeExit.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/stepper.h"
#include "src/activations/host_home.h"
#include "src/memory/absent_storage.h"
#include "src/memory/operator_mode.h"
#include "src/step/places.h"
#include "src/step/trained_parameters.h"
#include "tests/accelerator/planned_on_device.h"
#include "tests/step/random_training.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/model_on_device.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::weights_on_host_test {
namespace {

using ::testing::AllOf;
using testing::bits_of;
using testing::clones_of;
using testing::FailingAllocation;
using ::testing::HasSubstr;
using torch::Tensor;
using namespace testing::planned_on_device;

constexpr int64_t kWide = 256, kLayers = 6;

// Six weights of 256 KiB between two of 32 KiB, which never leave.
nn::Sequential layers() {
  auto model = testing::make_mlp({32, kWide, kWide, kWide, kWide, kWide, kWide, kWide, 32});
  testing::move_to(*model, device());
  return model;
}
constexpr int64_t kWeight = 4 * kWide * kWide;

std::vector<c10::Storage> large_storages(const nn::Sequential& model) {
  std::vector<c10::Storage> storages;
  for (const Tensor& parameter : model->parameters()) {
    if (parameter.storage().nbytes() == static_cast<size_t>(kWeight)) {
      storages.push_back(parameter.storage());
    }
  }
  return storages;
}

// The weights of a model on the host, until the end of the scope.
struct OnHost {
  OnHost(const nn::Sequential& model, int64_t bytes)
      : home(large_storages(model)), window(large_storages(model), home, bytes) {
    home.take_out();
    home.open_window(bytes);
  }
  ~OnHost() {
    window.let_go();
    home.take_back();
  }

  detail::OperatorSeam seam;
  detail::HostHome home;
  detail::WeightWindow window;
};

Tensor loss_of(nn::Sequential& model, const Batch& batch) { return (model->forward(batch[0]) - batch[1]).pow(2).sum(); }

// Steps that read every weight twice, and write every weight.
void train(nn::Sequential& model, const Batch& batch, int steps, const std::function<void()>& before_step = [] {}) {
  for (int step = 0; step < steps; ++step) {
    before_step();
    for (Tensor& parameter : model->parameters()) {
      parameter.mutable_grad().reset();
    }
    loss_of(model, batch).backward();
    const torch::NoGradGuard no_grad;
    for (Tensor& parameter : model->parameters()) {
      parameter.sub_(parameter.grad(), 1e-3);
    }
  }
}

std::string plain_bits(const Batch& batch, int steps) {
  nn::Sequential model = layers();
  train(model, batch, steps);
  return bits_of(model->parameters());
}

class WeightsOnHost : public ::testing::Test {
  void SetUp() override { SNUG_SKIP_UNLESS_SIMULATED(); }
};

TEST_F(WeightsOnHost, HaveTheBitsOfPlainTrainingInWindowsOfAnySize) {
  const Batch batch = device_batch(16);
  const std::string expected = plain_bits(batch, 3);
  for (const int64_t window : {2 * kWeight, kLayers * kWeight / 4, kLayers * kWeight}) {
    nn::Sequential model = layers();
    const int64_t before = live();
    {
      OnHost outside(model, window);
      EXPECT_EQ(live(), before - kLayers * kWeight + window);
      train(model, batch, 3, [&] { outside.window.let_go(); });
      EXPECT_TRUE(bits_of(clones_of(model->parameters())) == expected) << "read by operators";
    }
    EXPECT_TRUE(bits_of(model->parameters()) == expected) << window;
  }
}

// The first step brings weights at their use, later steps bring weights ahead.
TEST_F(WeightsOnHost, WaitForEachOtherOnLateStreams) {
  const Batch batch = device_batch(16);
  const std::string expected = plain_bits(batch, 3);
  for (const bool copies_are_early : {false, true}) {
    for (const int64_t window : {2 * kWeight, 4 * kWeight}) {
      nn::Sequential model = layers();
      {
        const sim_device::LazyStreams late(copies_are_early);
        OnHost outside(model, window);
        train(model, batch, 3, [&] { outside.window.let_go(); });
      }
      EXPECT_TRUE(bits_of(model->parameters()) == expected) << window;
    }
  }
}

std::vector<Tensor> large_weights(const nn::Sequential& model) {
  std::vector<Tensor> weights;
  for (const Tensor& parameter : model->parameters()) {
    if (parameter.nbytes() == static_cast<size_t>(kWeight)) {
      weights.push_back(parameter.detach());
    }
  }
  return weights;
}

// The host waits after each weight, as for a gradient that leaves. A copy of 256 KiB takes as long as four operators.
// With one operator for each weight the copies take longer, and hide all operators but the last one. With eight, the
// operators hide all copies but the first one.
TEST_F(WeightsOnHost, ComeBesideOperatorsInTheOrderOfTheLastTime) {
  nn::Sequential model = layers();
  const std::vector<Tensor> weights = large_weights(model);
  constexpr double kCopy = static_cast<double>(kWeight) / sim_device::kBytesPerSecond;
  const auto seconds = [&](OnHost& outside, int operators) {
    outside.window.let_go();
    const double began = sim_device::virtual_seconds();
    for (const Tensor& weight : weights) {
      for (int i = 1; i < operators; ++i) {
        weight.neg();
      }
      weight.sum().item<float>();
    }
    return sim_device::virtual_seconds() - began;
  };
  for (const int operators : {1, 8}) {
    OnHost outside(model, 2 * kWeight);
    const double computing = operators * sim_device::kOperatorSeconds;
    EXPECT_EQ(seconds(outside, operators), kLayers * (kCopy + computing)) << "at their use";
    EXPECT_EQ(seconds(outside, operators), operators == 1 ? kLayers * kCopy + computing : kCopy + kLayers * computing);
  }
}

TEST_F(WeightsOnHost, HaveTheirValuesInAnOrderThatChanges) {
  nn::Sequential model = layers();
  const std::vector<Tensor> weights = large_weights(model);
  const auto sums = [&](const std::function<void()>& before_each) {
    std::vector<Tensor> all;
    for (const std::vector<size_t>& order : std::vector<std::vector<size_t>>{
             {0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5}, {0, 1, 3, 4, 5, 2}, {5, 3, 1}, {5, 3, 1, 0}, {2, 2, 4}, {2, 4}}) {
      before_each();
      for (const size_t number : order) {
        all.push_back(weights[number].mul(static_cast<double>(all.size() + 1)));
      }
    }
    return all;
  };
  const std::string expected = bits_of(sums([] {}));
  for (const bool copies_are_early : {false, true}) {
    std::vector<Tensor> found;
    {
      const sim_device::LazyStreams late(copies_are_early);
      OnHost outside(model, 2 * kWeight);
      found = sums([&] { outside.window.let_go(); });
    }
    EXPECT_TRUE(bits_of(found) == expected) << copies_are_early;
  }
}

// Two streams use the same weights in turn, and memory of the window passes from one stream to the other.
TEST_F(WeightsOnHost, MayBeUsedByStreamsInTurn) {
  nn::Sequential model = layers();
  const std::vector<Tensor> parameters = model->parameters();
  const c10::impl::VirtualGuardImpl guard(device().type());
  const auto sums = [&] {
    std::vector<Tensor> all;
    for (int i = 0; i < 12; ++i) {
      const c10::StreamGuard on(i % 2 == 0 ? guard.getStream(device()) : guard.getStreamFromGlobalPool(device()));
      for (const Tensor& parameter : parameters) {
        if (parameter.dim() == 2) {
          all.push_back(parameter.detach().mul(i + 1));
        }
      }
    }
    return all;
  };
  const std::string expected = bits_of(sums());
  std::vector<Tensor> found;
  {
    const sim_device::LazyStreams late;
    const OnHost outside(model, 2 * kWeight);
    found = sums();
  }
  EXPECT_TRUE(bits_of(found) == expected);
}

TEST_F(WeightsOnHost, ThrowWhenTheirMemoryIsReadWithoutAnOperator) {
  nn::Sequential model = layers();
  const Tensor weight = model->parameters()[2];
  ASSERT_EQ(weight.nbytes(), static_cast<size_t>(kWeight));
  const std::string bits = bits_of({weight});
  {
    const OnHost outside(model, 2 * kWeight);
    EXPECT_THAT(testing::error_of<c10::Error>([&] { weight.data_ptr(); }), HasSubstr("host's memory"));
    EXPECT_THAT(testing::error_of<c10::Error>([&] { weight.const_data_ptr<float>(); }), HasSubstr("weight.cpu()"));
    EXPECT_THAT(testing::error_of<c10::Error>([&] { weight[3].mutable_data_ptr(); }), HasSubstr("host's memory"));
    EXPECT_TRUE(torch::equal(weight.cpu(), weight.detach().cpu()));
    EXPECT_EQ(weight[1][2].item<float>(), weight.cpu()[1][2].item<float>()) << "a view";
  }
  EXPECT_NO_THROW(weight.data_ptr());
  EXPECT_TRUE(bits_of({weight}) == bits);
}

TEST_F(WeightsOnHost, MayBeOperandsThatTheWindowIsTooSmallFor) {
  nn::Sequential model = layers();
  const std::vector<Tensor> large = large_weights(model);
  const std::string expected = bits_of({torch::stack(large)});
  for (const int64_t window : {kWeight / 2, kWeight, 3 * kWeight}) {
    const OnHost outside(model, window);
    const int64_t before = live();
    EXPECT_TRUE(bits_of({torch::stack(large)}) == expected) << window;
    EXPECT_EQ(live(), before) << "what has no room in the window leaves with the operator";
  }
}

TEST_F(WeightsOnHost, StayAsTheyAreWhicheverAllocationIsRefused) {
  nn::Sequential model = layers();
  const std::string expected = bits_of(model->parameters());
  testing::for_each_failing_allocation({.device = device().type()}, [&](FailingAllocation& allocation) {
    const std::vector<c10::Storage> storages = large_storages(model);
    detail::HostHome home(storages);
    home.take_out();
    allocation.arm();
    const auto refused = [](const auto& call) {
      try {
        call();
      } catch (const c10::OutOfMemoryError&) {
      }
    };
    const detail::OperatorSeam seam;
    {
      detail::WeightWindow window(storages, home, 2 * kWeight);
      refused([&] { home.open_window(2 * kWeight); });
      refused([&] { (void)(model->parameters()[2] + model->parameters()[4]); });
      window.let_go();
    }
    refused([&] { home.take_back(); });
    allocation.disarm();
    if (detail::is_borrowed_or_absent(storages.front().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks())) {
      home.take_back();
    }
    ASSERT_TRUE(bits_of(model->parameters()) == expected);
  });
}

// --- the place of a model

class WeightsOnHostPlace : public WeightsOnHost {
 protected:
  void go_backward() { loss_of(model_, batch_).backward(); }
  std::vector<Tensor> gradients() const {
    std::vector<Tensor> all;
    for (const Tensor& parameter : model_->parameters()) {
      all.push_back(parameter.grad().cpu());
      parameter.mutable_grad().reset();
    }
    return all;
  }
  // Whether the model came to the host.
  bool has_come() {
    try {
      place_.put(Place::Host);
    } catch (const std::exception&) {
      return false;
    }
    return true;
  }

  nn::Sequential model_ = layers();
  AdamW optimizer_{model_->parameters(), {.lr = 0.01}};
  detail::TrainedParameters parameters_{*model_, optimizer_};
  detail::ModelPlace place_{*model_, parameters_, std::filesystem::path()};
  const Batch batch_ = device_batch(16);
};

TEST_F(WeightsOnHostPlace, StaysAsItWasIfTheHostHasTooLittleMemory) {
  go_backward();
  const std::string expected = bits_of(gradients());
  int refused = 0;
  for (bool has_failed = true; has_failed;) {
    (void)sim_device::fail_pinned_after(refused + 1);
    const bool has_come_now = has_come();
    has_failed = sim_device::fail_pinned_after(0) == 0;
    ASSERT_EQ(has_come_now, !has_failed) << refused;
    ASSERT_EQ(place_.place(), has_failed ? Place::Memory : Place::Host);
    if (has_failed) {
      ++refused;
      go_backward();
      ASSERT_TRUE(bits_of(gradients()) == expected) << "gradients are the parameters' own";
    }
  }
  EXPECT_EQ(refused, kLayers + static_cast<int>(model_->parameters().size()) + 1)
      << "gradients that the CPU adds pass through one more place";
  place_.begin();
  go_backward();
  place_.end();
  EXPECT_TRUE(bits_of(gradients()) == expected);
}

// The memory of gradients that have left is released and poisoned when the host waits for the loss. The copies have
// read the memory before, and are complete at the end.
TEST_F(WeightsOnHostPlace, HasTheGradientsThatLeaveOnLateStreams) {
  go_backward();
  const std::string expected = bits_of(gradients());
  ASSERT_TRUE(has_come());
  for (const bool host_waits : {false, true}) {
    const sim_device::LazyStreams late;
    place_.begin();
    const Tensor loss = loss_of(model_, batch_);
    loss.backward();
    if (host_waits) {
      loss.item<float>();
    }
    place_.end();
    EXPECT_TRUE(bits_of(gradients()) == expected) << host_waits;
  }
}

TEST_F(WeightsOnHostPlace, HasAWindowLaterIfAnotherUserOfTheDeviceTakesTheRoom) {
  go_backward();
  const std::string expected = bits_of(gradients()), weights = bits_of(clones_of(model_->parameters()));
  const int64_t before = live();
  c10::getDeviceAllocator(device().type())->emptyCache();
  const int64_t limit = sim_device::set_limit(before - 5 * kWeight);  // room for one of the six weights
  EXPECT_FALSE(has_come());
  (void)sim_device::set_limit(limit);
  EXPECT_EQ(place_.place(), Place::Host);
  EXPECT_EQ(live(), before - kLayers * kWeight);
  EXPECT_TRUE(bits_of(clones_of(model_->parameters())) == weights) << "without a window";
  place_.begin();
  EXPECT_EQ(live(), before - kLayers * kWeight + 2 * kWeight);
  go_backward();
  place_.end();
  EXPECT_TRUE(bits_of(gradients()) == expected);
  place_.put(Place::Memory);
  EXPECT_EQ(live(), before);
  EXPECT_TRUE(bits_of(model_->parameters()) == weights);
}

// --- under a Stepper

// What a plan leaves for small things and for three scalars of each of 16 parameters (StepBudget::own_bytes). The
// scalars of an update on the CPU take nothing of the device.
constexpr int64_t kSmallThings = (16 << 10) + 16 * 3 * (512 - 4);

// Above what is alive without the model: less than the weights, which are 1.6 MiB.
Bytes tight() { return Bytes(live() + 5 * kWeight); }

StepperOptions options(Bytes budget) {
  return {.micro_batch = 16, .budget = {.memory = budget, .offload = std::filesystem::path()}};
}

std::string plain_training(const Batch& batch, int steps) {
  PlannedTraining plain({}, layers());
  for (int step = 0; step < steps; ++step) {
    plain.step(batch);
  }
  return bits_of(plain.state());
}

bool is_outside(const PlannedTraining& training) {
  return training.stepper.plan()->placement == Placement{.state = Place::Host, .model = Place::Host};
}

// Returns the predicted peak, with the larger window.
int64_t expect_as_predicted(const PlannedTraining& run, const StepResult& result) {
  const int64_t predicted = run.stepper.plan()->choice.peak_bytes + run.stepper.plan()->spare_bytes;
  EXPECT_LE(result.peak_bytes, predicted);
  EXPECT_GE(result.peak_bytes, predicted - kSmallThings);
  EXPECT_EQ(result.step_downs, 0);
  return predicted;
}

TEST_F(WeightsOnHost, LetAModelTrainThatIsLargerThanTheBudget) {
  const Batch batch = device_batch(16);
  const std::string expected = plain_training(batch, 5);
  const Bytes budget = tight();
  const int64_t before = live();
  std::vector<Tensor> parameters;
  std::string bits;
  {
    PlannedTraining run(options(budget), layers());
    for (int step = 0; step < 5; ++step) {
      const StepResult result = run.step(batch);
      expect_as_predicted(run, result);
      EXPECT_TRUE(run.model->parameters()[0].grad().is_cpu());
    }
    EXPECT_LE(live() - before, 3 * kWeight + run.stepper.plan()->spare_bytes) << "the window, and small weights";
    ASSERT_TRUE(is_outside(run));
    EXPECT_TRUE(bits_of(run.state()) == expected);
    const StepPlan plan = *run.stepper.plan();
    EXPECT_EQ(plan.bytes.weights.outside, kLayers * kWeight);
    EXPECT_EQ(plan.bytes.gradients.in_memory, 0);
    EXPECT_THAT(plan.explain(), HasSubstr("Weights and gradients are in the host's memory"));
    EXPECT_THAT(plan.verdict(), HasSubstr("state go to the host's memory"));
    EXPECT_EQ(StepPlan::from_json(plan.to_json()).placement, plan.placement);
    parameters = run.model->parameters();
    bits = bits_of(clones_of(parameters));
  }
  EXPECT_NO_THROW(parameters[2].data_ptr()) << "weights come back with the end of the Stepper";
  EXPECT_TRUE(bits_of(parameters) == bits);
}

TEST_F(WeightsOnHost, HaveTheGradientsOfSeveralMicroBatchesAndOfClipping) {
  const Batch batch = device_batch(48);
  const auto train = [&](StepperOptions with) {
    with.micro_batch = 16;
    with.clip_norm = 0.5;
    PlannedTraining run(with, layers());
    std::vector<double> norms;
    for (int step = 0; step < 3; ++step) {
      norms.push_back(run.step(batch).grad_norm());
    }
    EXPECT_EQ(with.budget.offload.has_value() && is_outside(run), with.budget.offload.has_value());
    return std::pair(bits_of(run.state()), norms);
  };
  EXPECT_TRUE(train(options(tight())) == train({}));
}

// On a stream of their own, from memory that is poisoned as soon as it is released. The sums of three micro-batches are
// the CPU's.
TEST_F(WeightsOnHost, LetGradientsLeaveOnLateStreams) {
  for (const int64_t items : {16, 48}) {
    const Batch batch = device_batch(items);
    const std::string expected = [&] {
      PlannedTraining plain({.micro_batch = 16}, layers());
      for (int step = 0; step < 3; ++step) {
        plain.step(batch);
      }
      return bits_of(plain.state());
    }();
    for (const bool copies_are_early : {false, true}) {
      PlannedTraining run(options(tight()), layers());
      {
        const sim_device::LazyStreams late(copies_are_early);
        for (int step = 0; step < 3; ++step) {
          run.step(batch);
        }
      }
      ASSERT_TRUE(is_outside(run));
      EXPECT_TRUE(bits_of(run.state()) == expected) << items << " items, early: " << copies_are_early;
    }
  }
}

// Forward and backward wait for copies as long as planned, to a copy. A copy takes as long as four operators. With one
// activation a layer the link is slower than the operators, with twelve faster. The plan predicts the time of the
// smallest window, of two weights. A larger window has fewer copies. A step waits for the missing ones only if the link
// is slow.
TEST_F(WeightsOnHost, TakeTheTimeThatThePlanPredicts) {
  struct Timed {
    double seconds, predicted;
    int64_t spare;
  };
  const Batch batch = device_batch(16);
  constexpr double kCopy = static_cast<double>(kWeight) / sim_device::kBytesPerSecond;
  for (const int activations : {1, 12}) {
    SCOPED_TRACE(activations);
    const auto step_in = [&](Bytes budget) {
      StepperOptions with = options(budget);
      double backward_ended = 0;
      with.before_update = [&](const auto&) { backward_ended = sim_device::virtual_seconds(); };
      const nn::Sequential plain = layers();
      nn::Sequential model;
      for (const auto& module : *plain) {
        model->push_back(module);
        for (int i = 1; module.ptr()->as<nn::Linear>() != nullptr && i < activations; ++i) {
          model->push_back(nn::GELU());
        }
      }
      PlannedTraining run(with, model);
      run.step(batch);
      (void)run.optimizer.state_dict();  // makes late updates, which are in no plan's time
      const double began = sim_device::virtual_seconds();
      run.step(batch);
      const StepPlan plan = *run.stepper.plan();
      return Timed{backward_ended - began, plan.choice.seconds, plan.spare_bytes};
    };
    const Timed narrow = step_in(tight()), wide = step_in(Bytes(tight().count() + 5 * kWeight)),
                in_memory = step_in(Bytes(live() + 400 * kWeight));
    ASSERT_EQ(narrow.spare, 0);
    ASSERT_GT(wide.spare, kWeight);
    EXPECT_LT(narrow.seconds - in_memory.seconds, activations == 1 ? kLayers * kCopy : 3 * kCopy)
        << "the rest is hidden";
    EXPECT_GT(narrow.predicted, in_memory.predicted);
    EXPECT_NEAR(narrow.seconds - in_memory.seconds, narrow.predicted - in_memory.predicted, kCopy);
    EXPECT_LE(wide.seconds, activations == 1 ? narrow.seconds - kCopy / 2 : narrow.seconds);
  }
}

// Bytes that the plan leaves unused go to the window, until all weights are in the window.
TEST_F(WeightsOnHost, StayInAWindowAsLargeAsTheBudgetAllows) {
  const Batch batch = device_batch(16);
  const std::string expected = plain_training(batch, 5);
  int64_t before = 0;
  for (const int64_t more : {1, 2, 3, 5}) {
    SCOPED_TRACE(more);
    const Bytes budget(tight().count() + more * kWeight);
    PlannedTraining run(options(budget), layers());
    for (int step = 0; step < 5; ++step) {
      const StepResult result = run.step(batch);
      EXPECT_LE(expect_as_predicted(run, result), budget.count());
    }
    ASSERT_TRUE(is_outside(run));
    EXPECT_TRUE(bits_of(run.state()) == expected);
    const int64_t spare = run.stepper.plan()->spare_bytes;
    EXPECT_GT(spare, before);
    EXPECT_EQ(spare == (kLayers - 2) * kWeight, more == 5);
    before = spare;
  }
}

// Other tensors of the program take the place of a larger window.
TEST_F(WeightsOnHost, LeaveALargerWindowToOtherTensors) {
  const Batch batch = device_batch(16);
  const std::string expected = plain_training(batch, 3);
  const Bytes budget(tight().count() + 2 * kWeight);
  PlannedTraining run(options(budget), layers());
  run.step(batch);
  const int64_t spare = run.stepper.plan()->spare_bytes;
  ASSERT_GT(spare, kWeight);
  {
    const Tensor of_another_user = torch::empty({spare - kWeight / 2}, torch::dtype(torch::kByte).device(device()));
    EXPECT_EQ(run.step(batch).step_downs, 0);
    EXPECT_LT(run.stepper.plan()->spare_bytes, spare);
  }
  EXPECT_EQ(run.step(batch).step_downs, 0);
  EXPECT_TRUE(bits_of(run.state()) == expected);
}

// Windows of different sizes, because budgets differ. Weights may leave from 2 KiB on.
TEST_F(WeightsOnHost, TrainRandomModelsInFiveBudgetsWithTheBitsOfPlainTraining) {
  const int on_host = testing::random_training::expect_the_bits_in_five_budgets(
      [](uint64_t seed) {
        const testing::RandomModel model = testing::model_on_device(seed);
        return testing::runs_on_device(model) ? std::optional(testing::model_on_device(seed)) : std::nullopt;
      },
      /*steps=*/5, device(), /*offload=*/{}, Place::Host);
  EXPECT_GE(on_host, 1);
}

// 16-bit weights and FP32 masters are 2.3 MiB, the budget is 1.25 MiB.
TEST_F(WeightsOnHost, MayHaveMastersWhichAreOnTheHostToo) {
  const Batch batch = device_batch(48);
  const auto train = [&](StepperOptions with) {
    with.precision = Precision::BFloat16;
    with.weights = Weights::Low;
    with.micro_batch = 16;
    with.clip_norm = 0.5;
    nn::Sequential model = layers();
    model->to(torch::kBFloat16);
    const bool is_planned = with.budget.offload.has_value();
    PlannedTraining run(with, model);
    double norms = 0;
    for (int step = 0; step < 4; ++step) {
      const StepResult result = run.step(batch);
      norms += result.grad_norm();
      if (is_planned) {
        EXPECT_LE(result.peak_bytes, run.stepper.plan()->choice.peak_bytes + run.stepper.plan()->spare_bytes);
        EXPECT_EQ(result.step_downs, 0);
      }
    }
    EXPECT_EQ(is_planned && is_outside(run), is_planned);
    return std::tuple(bits_of(run.state()), bits_of(testing::tensors_in(run.stepper.state_dict())), norms);
  };
  const auto [state, stepper, norms] = train(options(tight()));
  const auto [plain_state, plain_stepper, plain_norms] = train({});
  EXPECT_TRUE(state == plain_state);
  EXPECT_TRUE(stepper == plain_stepper) << "masters";
  EXPECT_EQ(norms, plain_norms);
}

TEST_F(WeightsOnHost, MayNeverHaveBeenOnTheDevice) {
  const Batch batch = device_batch(16);
  for (const Weights weights : {Weights::Full, Weights::Low}) {
    const auto train = [&](StepperOptions with, nn::Sequential model) {
      with.weights = weights;
      with.precision = weights == Weights::Low ? Precision::BFloat16 : Precision::Float32;
      PlannedTraining run(with, std::move(model));
      for (int step = 0; step < 3; ++step) {
        run.step(batch);
      }
      return bits_of(run.state());
    };
    const auto on_cpu = [&] {
      auto model = testing::make_mlp({32, kWide, kWide, kWide, kWide, kWide, kWide, kWide, 32});
      model->to(weights == Weights::Low ? torch::kBFloat16 : torch::kFloat);
      return model;
    };
    nn::Sequential plain = on_cpu();
    testing::move_to(*plain, device());
    const std::string expected = train({.micro_batch = 16}, plain);
    plain = nullptr;

    const Bytes budget(live() + 5 * kWeight);
    nn::Sequential model = on_cpu();
    {
      const MemoryLimit small_parameters(device(), Bytes(live() + kWeight / 2));
      move_with_weights_on_host(*model, c10::Device(device().type()));
    }
    EXPECT_THAT(testing::error_of<c10::Error>([&] { (void)model->parameters()[2].cpu(); }), HasSubstr("Stepper"));
    EXPECT_TRUE(train(options(budget), model) == expected);
  }
  nn::Linear linear(2, 2);
  EXPECT_THAT(testing::error_of<ConfigError>([&] { move_with_weights_on_host(*linear, torch::kCPU); }),
              HasSubstr("the device is the CPU"));
}

// The device has no room for the weights when the first Stepper ends. The second Stepper takes over the weights, and
// the memory of the first window.
TEST_F(WeightsOnHost, StayOutsideBetweenTwoSteppersWithoutRoomOnTheDevice) {
  const Batch batch = device_batch(16);
  for (const Weights weights : {Weights::Full, Weights::Low}) {
    const auto on_cpu = [&] {
      auto model = testing::make_mlp({32, kWide, kWide, kWide, kWide, kWide, kWide, kWide, 32});
      model->to(weights == Weights::Low ? torch::kBFloat16 : torch::kFloat);
      return model;
    };
    const auto train = [&](StepperOptions with, const nn::Sequential& model) {
      with.weights = weights;
      with.precision = weights == Weights::Low ? Precision::BFloat16 : Precision::Float32;
      PlannedTraining run(with, model);
      for (int step = 0; step < 2; ++step) {
        run.step(batch);
      }
      EXPECT_EQ(with.budget.offload && is_outside(run), with.budget.offload.has_value());
      std::vector<Tensor> numbers;  // one at a time on the device
      for (const Tensor& parameter : model->parameters()) {
        numbers.push_back(parameter.detach().cpu());
      }
      return bits_of(numbers);
    };
    nn::Sequential plain = on_cpu();
    testing::move_to(*plain, device());
    std::vector<std::string> expected;
    for (int stepper = 0; stepper < 3; ++stepper) {
      expected.push_back(train({.micro_batch = 16}, plain));
    }
    plain = nullptr;

    const Bytes budget(live() + (weights == Weights::Low ? 5 * kWeight / 2 : 5 * kWeight));  // the weights are more
    const MemoryLimit limit(device(), budget + Bytes(1));
    nn::Sequential model = on_cpu();
    move_with_weights_on_host(*model, c10::Device(device().type()));
    std::vector<int64_t> left;
    for (int stepper = 0; stepper < 3; ++stepper) {
      EXPECT_TRUE(train(options(budget), model) == expected[stepper]) << stepper;
      left.push_back(live());
      EXPECT_THROW(model->parameters()[2].data_ptr(), c10::Error) << "it is outside";
    }
    EXPECT_EQ(left[1], left[0]) << "one window";
    EXPECT_EQ(left[2], left[0]);
  }
}

TEST_F(WeightsOnHost, StayInMemoryWhereTheStateAloneMustLeave) {
  const Batch batch = device_batch(16);
  const Bytes budget(live() + 18 * kWeight);
  PlannedTraining run(options(budget), layers());
  run.step(batch);
  EXPECT_EQ(run.stepper.plan()->placement, (Placement{.state = Place::Host}));
}

TEST_F(WeightsOnHost, MakeTheStepOrLeaveEverythingWhicheverAllocationIsRefused) {
  const Batch batch = device_batch(16);
  const std::string before = plain_training(batch, 1), after = plain_training(batch, 2);
  testing::for_each_failing_allocation({.is_thinned = true, .device = device().type()},
                                       [&](FailingAllocation& allocation) {
                                         const Bytes budget = tight();
                                         PlannedTraining run(options(budget), layers());
                                         run.step(batch);
                                         ASSERT_TRUE(is_outside(run));
                                         try {
                                           allocation.arm();
                                           const auto disarm = c10::make_scope_exit([&] { allocation.disarm(); });
                                           run.step(batch);
                                         } catch (const std::exception&) {  // BudgetExceeded, or out of memory
                                           ASSERT_TRUE(bits_of(run.state()) == before);
                                           run.step(batch);
                                         }
                                         ASSERT_TRUE(bits_of(run.state()) == after);
                                       });
}

// The first step moves weights, gradients and state to page-locked memory.
TEST_F(WeightsOnHost, AreAsBeforeWhicheverPageLockedMemoryIsRefused) {
  const Batch batch = device_batch(16);
  const std::string before = plain_training(batch, 0), after = plain_training(batch, 1);
  int refusals = 0;
  for (bool was_refused = true; was_refused; refusals += was_refused ? 1 : 0) {
    SCOPED_TRACE(refusals + 1);
    const Bytes budget = tight();
    PlannedTraining run(options(budget), layers());
    (void)sim_device::fail_pinned_after(refusals + 1);
    const auto disarm = c10::make_scope_exit([] { sim_device::fail_pinned_after(0); });
    bool is_made = true;
    try {
      run.step(batch);
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("the host has too little memory"), HasSubstr("offload")));
      is_made = false;
    }
    was_refused = sim_device::fail_pinned_after(0) == 0;
    EXPECT_TRUE(is_made || was_refused);
    if (!is_made) {
      ASSERT_TRUE(bits_of(run.state()) == before);
      run.step(batch);
    }
    ASSERT_TRUE(bits_of(run.state()) == after);
    ASSERT_TRUE(is_outside(run));
  }
  EXPECT_GE(refusals, 3);
}

// A weight that two layers share, a weight that is frozen, a layer that every second step leaves out, and a weight that
// comes later.
TEST_F(WeightsOnHost, MayBeSharedFrozenLeftOutAndAdded) {
  const Batch batch = device_batch(16);
  const auto train = [&](const StepperOptions& with) {
    torch::manual_seed(1);
    nn::Sequential model = layers();
    std::vector<nn::Linear> linear;
    for (const auto& module : model->children()) {
      if (auto layer = std::dynamic_pointer_cast<nn::LinearImpl>(module)) {
        linear.emplace_back(layer);
      }
    }
    linear[2]->weight.set_requires_grad(false);
    AdamW optimizer(model->parameters(), {.lr = 0.01});
    Stepper stepper(model, optimizer, with);
    double sums = 0;
    for (int step = 0; step < 6; ++step) {
      stepper.step(batch, [&](const Batch& micro) {
        Tensor hidden = torch::relu(linear[0]->forward(micro[0]));
        for (size_t i = 1; i <= kLayers; ++i) {
          hidden = i == 3 && step % 2 == 1 ? hidden : torch::relu(linear[i]->forward(hidden));
        }
        hidden = torch::relu(linear[1]->forward(hidden));
        return Loss::sum((linear.back()->forward(hidden) - micro[1]).pow(2).sum(), micro[1].numel());
      });
      sums += linear[4]->weight.sum().item<double>();
      if (step == 3) {
        const torch::NoGradGuard no_grad;
        linear[5]->weight.set_data(linear[5]->weight.detach() * 0.5);  // another storage
      }
    }
    EXPECT_TRUE(!with.budget.offload || stepper.plan()->placement.model == Place::Host);
    return std::pair(bits_of(clones_of(model->parameters())), sums);
  };
  const Bytes budget(live() + 6 * kWeight);
  EXPECT_TRUE(train(options(budget)) == train({.micro_batch = 16}));
}

}  // namespace
}  // namespace snug::weights_on_host_test
