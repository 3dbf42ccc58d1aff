// Under a memory budget with offload, weights, gradients and the optimizer's state may all be in files.

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "snug/sgd.h"
#include "snug/snapshot.h"
#include "snug/stepper.h"
#include "src/core/file_memory.h"
#include "src/core/gradient_hooks.h"
#include "src/memory/cpu_allocator.h"
#include "src/step/places.h"
#include "src/step/trained_parameters.h"
#include "tests/step/planned_training.h"
#include "tests/step/random_training.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/small_models.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

namespace snug::stepper_model_in_file_test {
namespace {

using ::testing::AllOf;
using testing::bits_of;
using testing::FailingAllocation;
using testing::for_each_failing_allocation;
using ::testing::HasSubstr;
using testing::make_mlp;
using testing::same_bits;
using testing::TemporaryFolder;
using testing::planned::live;
using testing::planned::make_batch;
using testing::planned::PlannedTraining;
using torch::Tensor;
namespace nn = torch::nn;

constexpr int64_t kMiB = 1 << 20;

// Eight matrices of a MiB.
nn::Sequential wide() { return make_mlp({32, 512, 512, 512, 512, 512, 512, 512, 512, 512, 32}); }

StepperOptions options(Bytes budget, const TemporaryFolder& folder) {
  return {.budget = {.memory = budget, .offload = folder.path()}};
}

std::string plain_training(const Batch& batch, StepperOptions with, int steps) {
  PlannedTraining plain(std::move(with), wide());
  for (int step = 0; step < steps; ++step) {
    plain.step(batch);
  }
  return bits_of(plain.state());
}

bool is_in_file(const nn::Sequential& model) {
  const std::vector<Tensor> parameters = model->parameters();
  return std::any_of(parameters.begin(), parameters.end(),
                     [](const Tensor& parameter) { return detail::FileMemory::holds(parameter.const_data_ptr()); });
}

// A Stepper leaves room for small things of its own.
void expect_as_predicted(int64_t peak, const std::optional<StepPlan>& plan) {
  constexpr int64_t kSmallThings = 20 << 10;
  ASSERT_TRUE(plan);
  const int64_t predicted = plan->choice.peak_bytes + plan->spare_bytes;
  EXPECT_LE(peak, predicted);
  EXPECT_GE(peak, predicted - kSmallThings);
}

// Of AdamW, whose state is twice the weights. What is small stays, and weights pass through a window.
void expect_all_outside(const BytesByKind& bytes, const std::vector<Tensor>& parameters) {
  int64_t all = 0, small = 0, largest = 0;
  for (const Tensor& parameter : parameters) {
    const auto of_one = static_cast<int64_t>(parameter.nbytes());
    all += of_one;
    small += of_one < static_cast<int64_t>(detail::in_file_from()) ? of_one : 0;
    largest = std::max(largest, of_one);
  }
  EXPECT_EQ(bytes.weights, (PlacedBytes{small + largest, all - small}));
  EXPECT_EQ(bytes.gradients, (PlacedBytes{small, all - small}));
  EXPECT_EQ(bytes.optimizer_state, (PlacedBytes{0, 2 * all}));
  EXPECT_GT(bytes.activations.in_memory, 0);
}

// Half of the weights alone.
TEST(StepperModelInFile, TrainsInLessThanItsWeightsWithTheBitsOfPlainTraining) {
  const TemporaryFolder folder;
  const Batch batch = make_batch(64);
  for (const auto& [micro_batch, clip_norm] : {std::pair<int64_t, double>{64, 0}, {20, 0.1}}) {
    const std::string expected = plain_training(batch, {.micro_batch = micro_batch, .clip_norm = clip_norm}, 4);
    const int64_t before = live();
    StepperOptions with = options(Bytes(before + 4 * kMiB), folder);
    with.micro_batch = micro_batch;
    with.clip_norm = clip_norm;
    PlannedTraining run(with, wide());
    for (int step = 0; step < 4; ++step) {
      const StepResult result = run.step(batch);
      expect_as_predicted(result.peak_bytes, run.stepper.plan());
      EXPECT_LE(result.peak_bytes, before + 4 * kMiB);
    }
    EXPECT_LT(live() - before, 2 * kMiB + run.stepper.plan()->spare_bytes) << "a window";
    EXPECT_TRUE(bits_of(run.state()) == expected);
    EXPECT_EQ(run.stepper.plan()->placement.model, Place::File);
    EXPECT_EQ(run.stepper.plan()->placement.state, Place::File);
    EXPECT_THAT(run.stepper.plan()->explain(), HasSubstr("Weights and gradients are in files"));
    EXPECT_THAT(run.stepper.plan()->verdict(), HasSubstr("go to files"));
    EXPECT_EQ(StepPlan::from_json(run.stepper.plan()->to_json()).placement.model, Place::File);
    expect_all_outside(run.stepper.plan()->bytes, run.model->parameters());
  }
}

// A gradient that the program holds makes the next step put its own into a new file.
TEST(StepperModelInFile, ARelativeDirectoryIsThatOfTheConstructorWhereTheProgramGoesElsewhere) {
  const TemporaryFolder folder, elsewhere;
  const Batch batch = make_batch(64);
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  std::filesystem::create_directory("run");
  PlannedTraining run({.micro_batch = 64, .budget = {.memory = Bytes(live() + 4 * kMiB), .offload = "run"}}, wide());
  run.step(batch);
  std::filesystem::current_path(elsewhere.path());
  const Tensor held = run.model->parameters()[2].grad();
  EXPECT_NO_THROW(run.step(batch));
  std::filesystem::current_path(before);
  EXPECT_EQ(run.stepper.plan()->placement.model, Place::File);
}

TEST(StepperModelInFile, StaysInMemoryWhereThatFits) {
  const TemporaryFolder folder;
  const Batch batch = make_batch(16);
  PlannedTraining run(options(Bytes(live() + 64 * kMiB), folder), wide());
  run.step(batch);
  EXPECT_EQ(run.stepper.plan()->placement.model, Place::Memory);
  EXPECT_FALSE(is_in_file(run.model));
}

TEST(StepperModelInFile, AProgramReadsWeightsAndGradientsBetweenSteps) {
  const TemporaryFolder folder;
  const Batch batch = make_batch(64);
  const auto train = [&](PlannedTraining& run) {
    std::string seen;
    for (int step = 0; step < 3; ++step) {
      run.step(batch);
      for (const Tensor& parameter : run.model->parameters()) {
        seen += bits_of({parameter, parameter.grad()});
      }
      const torch::NoGradGuard no_grad;
      seen += bits_of({run.model->forward(batch[0])});
      run.model->parameters()[2].mul_(0.5);
    }
    return seen;
  };
  std::string expected;
  {
    PlannedTraining plain({}, wide());
    expected = train(plain);
  }
  PlannedTraining run(options(Bytes(live() + 4 * kMiB), folder), wide());
  EXPECT_TRUE(train(run) == expected);
  EXPECT_TRUE(is_in_file(run.model));
  const Tensor held = run.model->parameters()[2].grad(), values = held.clone();
  run.step(batch);
  EXPECT_TRUE(torch::equal(held, values)) << "a gradient that the program holds is its own";
}

// A layer that two places share, a buffer that the forward writes, and a layer that does not train.
struct Shared : nn::Module {
  nn::Linear in{32, 512}, twice{512, 512}, out{512, 32}, frozen{512, 512};
  Tensor table = register_buffer("table", torch::ones({256, 512}));

  Shared() {
    register_module("in", in);
    register_module("twice", twice);
    register_module("again", twice);
    register_module("frozen", frozen);
    register_module("out", out);
    for (Tensor& parameter : frozen->parameters()) {
      parameter.set_requires_grad(false);
    }
  }
  Tensor forward(const Tensor& x) {
    Tensor hidden = twice->forward(in->forward(x).tanh()).tanh();
    hidden = frozen->forward(twice->forward(hidden)) + torch::mm(hidden, twice->weight.t());
    {
      const torch::NoGradGuard no_grad;
      table.mul_(0.9).add_(hidden.mean());
    }
    return out->forward(hidden * table.mean());
  }
};

TEST(StepperModelInFile, TakesTiedFrozenAndWrittenTensorsAlong) {
  const TemporaryFolder folder;
  const Batch batch = make_batch(32);
  const auto train = [&](const StepperOptions& with, bool freezes) {
    torch::manual_seed(5);
    const auto model = std::make_shared<Shared>();
    AdamW optimizer(model->parameters(), {.lr = 0.01});
    Stepper stepper(model, optimizer, with);
    for (int step = 0; step < 4; ++step) {
      if (freezes && step == 2) {
        model->in->weight.set_requires_grad(false);
        model->frozen->weight.set_requires_grad(true);
      }
      stepper.step(batch, [&](const Batch& micro) {
        return Loss::mean((model->forward(micro[0]) - micro[1]).square().mean(), micro.size());
      });
    }
    EXPECT_TRUE(with.budget.memory.is_unlimited() || stepper.plan()->placement.model == Place::File);
    std::vector<Tensor> all = model->parameters();
    all.push_back(model->table);
    return bits_of(all);
  };
  for (const bool freezes : {false, true}) {
    const std::string plain = train({.micro_batch = 32}, freezes);
    StepperOptions with = options(Bytes(live() + 11 * kMiB / 2), folder);
    with.micro_batch = 32;
    EXPECT_TRUE(train(with, freezes) == plain);
  }
}

TEST(StepperModelInFile, TheSmallestBudgetThatIsToldWillDo) {
  const TemporaryFolder folder;
  const Batch batch = make_batch(16);
  const int64_t before = live();
  Bytes smallest(0);
  for (int64_t quarters = 6; smallest.count() == 0; ++quarters) {  // until parts of a step run
    PlannedTraining run(options(Bytes(before + quarters * kMiB / 4), folder), wide());
    try {
      run.step(batch);
      smallest = Bytes(before + quarters * kMiB / 4);
    } catch (const BudgetExceeded& error) {
      smallest = error.smallest_feasible();
    }
  }
  EXPECT_LT(smallest.count() - before, 4 * kMiB) << "less than the weights";
  PlannedTraining run(options(smallest, folder), wide());
  run.step(batch);
  EXPECT_EQ(run.stepper.plan()->placement.model, Place::File);
}

TEST(StepperModelInFile, IsBuiltInFilesWhereItDoesNotFitAndIsResumedWithinTheSameBudget) {
  const TemporaryFolder folder;
  const Batch batch = make_batch(64);
  const Bytes budget(live() + 4 * kMiB);
  const auto parts = [](PlannedTraining& run) {
    return std::map<std::string, Stateful>{
        {"model", stateful(*run.model)}, {"optimizer", stateful(run.optimizer)}, {"stepper", stateful(run.stepper)}};
  };
  const auto build = [&] {
    const TensorsInFile in_file(folder.path());
    return wide();
  };
  const std::string expected = plain_training(batch, {.micro_batch = 64}, 3);
  StepperOptions with = options(budget, folder);
  with.micro_batch = 64;
  const MemoryLimit limit(torch::kCPU, budget);
  {
    PlannedTraining run(with, build());
    run.step(batch);
    run.step(batch);
    SnapshotStore(folder / "snapshots").save(2, parts(run));
  }
  PlannedTraining resumed(with, build());
  ASSERT_EQ(SnapshotStore(folder / "snapshots").load_latest(parts(resumed)), 2);
  resumed.step(batch);
  std::string bits;
  for (const Tensor& parameter : resumed.model->parameters()) {
    bits += bits_of({parameter});
  }
  EXPECT_TRUE(bits == expected.substr(0, bits.size()));
}

TEST(StepperModelInFile, IsInPlansThatAreReadBack) {
  const TemporaryFolder folder, plans;
  const Batch batch = make_batch(64);
  const auto run = [&] {
    StepperOptions with = options(Bytes(live() + 4 * kMiB), folder);
    with.budget.plan_folder = plans.path();
    with.micro_batch = 64;
    PlannedTraining training(with, wide());
    training.step(batch);
    const int calls = training.calls;
    EXPECT_EQ(training.stepper.plan()->placement.model, Place::File);
    EXPECT_TRUE(is_in_file(training.model));
    training.step(batch);
    return std::pair(calls, bits_of(training.model->parameters()));
  };
  const auto [first_calls, first] = run();
  const auto [second_calls, second] = run();
  EXPECT_GT(first_calls, 1);
  EXPECT_EQ(second_calls, 1) << "nothing is tried";
  EXPECT_TRUE(first == second);
}

TEST(StepperModelInFile, ALossOfNothingAndAFailingLossLeaveAllAsItWas) {
  const TemporaryFolder folder;
  const Batch batch = make_batch(64);
  const std::string expected = plain_training(batch, {.micro_batch = 16}, 2);
  StepperOptions with = options(Bytes(live() + 4 * kMiB), folder);
  with.micro_batch = 16;
  PlannedTraining run(with, wide());
  run.step(batch);
  int calls = 0;
  const auto failing = [&](const Batch& micro) {
    if (++calls == 3) {
      throw std::runtime_error("the third");
    }
    return run.loss_of(micro);
  };
  EXPECT_THROW(run.stepper.step(batch, failing), std::runtime_error);
  run.step(batch);
  EXPECT_TRUE(bits_of(run.state()) == expected);
}

TEST(StepperModelInFile, AProgramGoesBackwardItselfBetweenSteps) {
  const TemporaryFolder folder;
  const Batch batch = make_batch(64);
  const auto train = [&](PlannedTraining& run) {
    std::string seen;
    for (int step = 0; step < 3; ++step) {
      run.step(batch);
      run.model->forward(batch[0]).sum().backward();  // adds to the step's gradients
      seen += bits_of({run.model->parameters()[2].grad()});
      run.model->zero_grad();
      run.model->forward(batch[0]).square().sum().backward();
      seen += bits_of({run.model->parameters()[2].grad()});
    }
    return seen + bits_of(run.model->parameters());
  };
  std::string expected;
  {
    PlannedTraining plain({.micro_batch = 64}, wide());
    expected = train(plain);
  }
  StepperOptions with = options(Bytes(live() + 12 * kMiB), folder);  // and the program's own gradients
  with.micro_batch = 64;
  PlannedTraining run(with, wide());
  EXPECT_TRUE(train(run) == expected);
}

TEST(StepperModelInFile, AccumulatesMicroBatchesOfALoaderAndAnUnfinishedWindow) {
  const TemporaryFolder folder;
  const Batch batch = make_batch(64);
  const auto train = [&](StepperOptions with) {
    with.accumulate.every = 3;
    PlannedTraining run(with, wide());
    const auto loss_of = [&](const Batch& micro) { return run.loss_of(micro); };
    for (const Batch& micro : micro_batches(batch, 16)) {
      run.stepper.accumulate(micro, loss_of);
    }
    EXPECT_TRUE(run.stepper.flush());
    EXPECT_TRUE(with.budget.memory.is_unlimited() || is_in_file(run.model));
    return bits_of(run.model->parameters());
  };
  const std::string expected = train({});
  EXPECT_TRUE(train(options(Bytes(live() + 4 * kMiB), folder)) == expected);
}

TEST(StepperModelInFile, WeightsWhoseMemoryWasExchangedMoveAgain) {
  const TemporaryFolder folder;
  const Batch batch = make_batch(64);
  const auto train = [&](PlannedTraining& run) {
    run.step(batch);
    const TensorsInFile in_file(folder.path());
    for (Tensor& parameter : run.model->parameters()) {
      const torch::NoGradGuard no_grad;
      parameter.set_data(parameter.detach() * 0.5);  // as torch::load does
    }
    run.step(batch);
    return bits_of(run.model->parameters());
  };
  std::string expected;
  {
    PlannedTraining plain({.micro_batch = 64}, wide());
    expected = train(plain);
  }
  StepperOptions with = options(Bytes(live() + 4 * kMiB), folder);
  with.micro_batch = 64;
  PlannedTraining run(with, wide());
  EXPECT_TRUE(train(run) == expected);
  EXPECT_TRUE(is_in_file(run.model));
}

TEST(StepperModelInFile, DoesNotTakeAHookOfTheProgramsAway) {
  const TemporaryFolder folder;
  const Batch batch = make_batch(64);
  PlannedTraining run(options(Bytes(live() + 4 * kMiB), folder), wide());
  run.step(batch);
  detail::GradientHooks hooks;
  hooks.set(run.model->parameters()[0], [](const Tensor&) {});
  EXPECT_THAT(testing::error_of<ConfigError>([&] { run.step(batch); }), HasSubstr("hook"));
  EXPECT_TRUE(detail::has_gradient_hook(run.model->parameters()[0]));
}

// Each allocation of two steps, files among them, fails once. Then a step is made again or is not made, and the next
// ones have the bits of plain training.
TEST(StepperModelInFile, LosesNothingWhicheverAllocationFails) {
  const TemporaryFolder folder;
  const Batch batch = make_batch(64);
  const std::string expected = plain_training(batch, {.micro_batch = 64}, 2);
  int failures = 0;
  for (int64_t countdown = 1; countdown < 4000; countdown = countdown * 5 / 4 + 1) {
    StepperOptions with = options(Bytes(live() + 4 * kMiB), folder);
    with.micro_batch = 64;
    PlannedTraining run(with, wide());
    detail::fail_allocation_after(countdown);
    int steps = 0;
    try {
      run.step(batch);
      ++steps;
    } catch (const std::exception&) {  // the step is not made, and leaves nothing
    }
    failures += detail::fail_allocation_after(0) == 0 ? 1 : 0;
    while (steps++ < 2) {
      run.step(batch);
    }
    EXPECT_TRUE(bits_of(run.state()) == expected) << "allocation " << countdown;
  }
  EXPECT_GT(failures, 0);
}

TEST(ModelPlace, StaysInMemoryWhicheverAllocationFails) {
  const TemporaryFolder folder;
  nn::Sequential model = wide();
  SGD optimizer(model->parameters(), {.lr = 0.1});
  const detail::TrainedParameters parameters(*model, optimizer);
  detail::ModelPlace place(*model, parameters, folder.path());
  const auto in_files = [&] {
    const auto all = model->parameters();
    return std::count_if(all.begin(), all.end(),
                         [](const Tensor& one) { return detail::FileMemory::holds(one.storage().data()); });
  };
  const int64_t failed = for_each_failing_allocation([&](FailingAllocation& allocation) {
    const bool is_stopped = allocation.stops([&] { place.put(Place::File); });
    EXPECT_EQ(place.place() == Place::File, !is_stopped);
    EXPECT_EQ(in_files(), is_stopped ? 0 : 10) << "of 64 KiB and more";
  });
  EXPECT_GT(failed, 8) << "of weights and of gradients";
}

// --- any model

TEST(StepperModelInFile, TrainsRandomModelsInFiveBudgetsWithTheBitsOfPlainTrainingBelowThePeakThatWasPredicted) {
  const TemporaryFolder folder;
  const int in_files = testing::random_training::expect_the_bits_in_five_budgets(
      [](uint64_t seed) { return std::optional(testing::random_model(seed)); }, /*steps=*/2, torch::kCPU, folder.path(),
      Place::File);
  EXPECT_GE(in_files, 3);
}

}  // namespace
}  // namespace snug::stepper_model_in_file_test
