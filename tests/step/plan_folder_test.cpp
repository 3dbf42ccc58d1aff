// Plans that one Stepper leaves in a folder and another one reads: nothing is tried again, and the steps are the same.

#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "src/core/file_system.h"
#include "tests/step/planned_training.h"
#include "tests/support/temporary_folder.h"

namespace snug::plan_folder_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using testing::TemporaryFolder;
using torch::Tensor;
using namespace testing::planned;

struct Outcome {
  int calls = 0;  // of loss_of
  int64_t micro_batches = 0;
  int64_t items = 0;
  int64_t peak_bytes = 0;
  std::string read_from, considered, deviation;
  std::vector<std::vector<double>> state;  // no tensors, which would be alive in the next step
};

// One step of a new model with a new Stepper. `room`: bytes for what it adds to what is alive without them.
Outcome one_step(
    const Batch& batch, int64_t room, StepperOptions options,
    const std::function<nn::Sequential()>& make = [] { return deep(); }) {
  options.budget.memory = Bytes(live() + room);
  PlannedTraining run(options, make());
  torch::manual_seed(11);
  const StepResult result = run.step(batch);
  EXPECT_LE(result.peak_bytes, options.budget.memory.count());
  Outcome outcome{.calls = run.calls,
                  .micro_batches = result.micro_batches,
                  .peak_bytes = result.peak_bytes,
                  .deviation = result.plan_deviation};
  for (const Tensor& tensor : run.state()) {
    const Tensor values = tensor.to(torch::kDouble).contiguous();
    outcome.state.emplace_back(values.data_ptr<double>(), values.data_ptr<double>() + values.numel());
  }
  if (const auto plan = run.stepper.plan()) {
    outcome.items = plan->choice.items;
    outcome.read_from = plan->read_from.string();
    outcome.considered = plan->considered;
  }
  return outcome;
}

std::filesystem::path only_file(const TemporaryFolder& folder) {
  const auto names = detail::FileSystem::real().list(folder.path());
  EXPECT_EQ(names.size(), 1U);
  return folder / names.at(0);
}

// --- the promise

class PlanFolder : public ::testing::Test {
 protected:
  // Reads what the first leaves, and differs from it in nothing but the trials.
  Outcome expect_second_tries_nothing(int64_t room, StepperOptions options) {
    options.budget.plan_folder = folder / "plans";  // which is not there yet
    const Outcome first = one_step(batch, room, options);
    EXPECT_GT(first.calls, first.micro_batches);
    EXPECT_THAT(first.read_from, IsEmpty());
    const Outcome second = one_step(batch, room, options);
    EXPECT_EQ(second.calls, second.micro_batches) << "only the step itself";
    EXPECT_THAT(second.read_from, HasSubstr("plan-"));
    EXPECT_EQ(second.items, first.items);
    EXPECT_EQ(second.peak_bytes, first.peak_bytes);
    EXPECT_EQ(second.deviation, "");
    EXPECT_EQ(second.state, first.state);
    return second;
  }

  const TemporaryFolder folder;
  const Batch batch = make_batch(512);
  const int64_t plain = plain_bytes(batch, {}, [] { return deep(); });
};

TEST_F(PlanFolder, SavesTheTrialsOfAPlanThatRebuilds) {
  expect_second_tries_nothing(plain * 6 / 10, {.micro_batch = 512});
}

TEST_F(PlanFolder, SavesTheTrialsOfAPlanThatKeepsEverything) { expect_second_tries_nothing(2 * plain, {}); }

TEST_F(PlanFolder, SavesTheTrialsOfAPlanThatCutsTheBatch) {
  const int64_t smallest = smallest_bytes(batch, {}, [] { return deep(); });
  EXPECT_GT(expect_second_tries_nothing(smallest + smallest / 4, {}).micro_batches, 1);
}

TEST_F(PlanFolder, IsThatOfTheConstructorWhereTheProgramGoesElsewhere) {
  const TemporaryFolder elsewhere;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  PlannedTraining run({.budget = {.memory = Bytes(int64_t{1} << 30), .plan_folder = "plans"}});
  std::filesystem::current_path(elsewhere.path());
  run.step(batch);
  std::filesystem::current_path(before);
  EXPECT_TRUE(std::filesystem::exists(folder / "plans"));
  EXPECT_TRUE(detail::FileSystem::real().list(elsewhere.path()).empty());
}

TEST_F(PlanFolder, ServesPlanForAndIsSaidByThePlan) {
  const auto plan = [&] {
    PlannedTraining run({.budget = {.memory = Bytes(int64_t{1} << 30), .plan_folder = folder.path()}});
    const auto result = run.stepper.plan_for(batch, [&](const Batch& micro) { return run.loss_of(micro); });
    return std::pair(run.calls, result->explain());
  };
  EXPECT_GT(plan().first, 0);
  const auto [calls, text] = plan();
  EXPECT_EQ(calls, 0);
  EXPECT_THAT(text, HasSubstr("Read from " + only_file(folder).string()));
}

TEST_F(PlanFolder, KeepsThePlansOfSeveralShapes) {
  const Batch half = make_batch(256);
  const auto steps = [&] {
    PlannedTraining run(
        {.micro_batch = 64, .budget = {.memory = Bytes(int64_t{1} << 30), .plan_folder = folder.path()}});
    const auto rows = [&](const Batch& of, int64_t begin) {
      return Batch{of[0].view({-1, 2, kWidth}).slice(1, begin), of[1].view({-1, 2, kWidth}).slice(1, begin)};
    };
    run.step(rows(half, 0));
    run.step(rows(half, 1));
    return run.calls;
  };
  EXPECT_GT(steps(), 4);
  EXPECT_EQ(steps(), 4) << "two steps of two micro-batches";
}

// --- what a plan does not hold for

TEST_F(PlanFolder, IsNotReadForAnotherBudgetModelOptionOrBatch) {
  const StepperOptions options{.micro_batch = 512, .budget = {.plan_folder = folder.path()}};
  const int64_t room = plain * 6 / 10;
  one_step(batch, room, options);
  const auto expect_own_plan = [&](const char* what, const Outcome& other) {
    EXPECT_THAT(other.read_from, IsEmpty()) << what;
    EXPECT_EQ(other.deviation, "") << what;
  };
  expect_own_plan("budget", one_step(batch, room + 4096, options));
  expect_own_plan("micro-batch", one_step(batch, room, {.micro_batch = 256, .budget = {.plan_folder = folder.path()}}));
  expect_own_plan("batch", one_step(make_batch(256), room, options));
  expect_own_plan("model", one_step(batch, room + (1 << 20), options, [] { return testing::make_mlp({32, 96, 32}); }));
  const auto frozen = [] {
    nn::Sequential model = deep();
    model->parameters()[0].requires_grad_(false);
    return model;
  };
  expect_own_plan("frozen", one_step(batch, room, options, frozen));
}

TEST_F(PlanFolder, PlansAnewWhereMoreIsAliveThanThePlanHasRoomFor) {
  const StepperOptions options{.micro_batch = 512, .budget = {.plan_folder = folder.path()}};
  const int64_t budget = live() + plain * 7 / 10;
  const auto first = one_step(batch, budget - live(), options);
  const Tensor ballast = torch::zeros({plain / 10}, torch::kByte);
  const auto second = one_step(batch, budget - live(), options);
  EXPECT_THAT(second.read_from, IsEmpty());
  EXPECT_LT(second.peak_bytes - ballast.numel(), first.peak_bytes);
  EXPECT_EQ(second.state, first.state);
}

TEST_F(PlanFolder, PlansAnewAfterAStepOfOtherOperatorsOnTheSameParameters) {
  const auto with = [](const auto& activation) {
    nn::Sequential model;
    torch::manual_seed(3);
    for (int i = 0; i < 4; ++i) {
      model->push_back(nn::Linear(kWidth, kWidth));
      model->push_back(activation);
    }
    return model;
  };
  const StepperOptions options{.budget = {.plan_folder = folder.path()}};
  const int64_t room = 64 << 20;
  one_step(batch, room, options, [&] { return with(nn::GELU()); });
  const auto changed = [&] { return with(nn::Tanh()); };
  EXPECT_THAT(one_step(batch, room, options, changed).deviation, HasSubstr("tanh"));
  const auto third = one_step(batch, room, options, changed);
  EXPECT_EQ(third.deviation, "");
  EXPECT_THAT(third.read_from, IsEmpty()) << "the plan that did not hold is gone";
}

// Comparing costs time. In the first step a change is noticed: see above.
TEST_F(PlanFolder, ComparesTheOperatorsOfAPlanThatKeepsEverythingInTheFirstStepOnly) {
  bool is_changed = false;
  const auto make = [&] {
    torch::manual_seed(3);
    const auto activation = [&](const Tensor& x) { return is_changed ? torch::tanh(x) : torch::gelu(x); };
    return nn::Sequential(nn::Linear(kWidth, kWidth), nn::Functional(activation), nn::Linear(kWidth, kWidth));
  };
  const StepperOptions options{.budget = {.memory = Bytes(live() + (64 << 20)), .plan_folder = folder.path()}};
  PlannedTraining(options, make()).step(batch);
  PlannedTraining run(options, make());
  run.step(batch);
  EXPECT_THAT(run.stepper.plan()->read_from.string(), HasSubstr("plan-"));
  is_changed = true;
  EXPECT_EQ(run.step(batch).plan_deviation, "");
  PlannedTraining first(options, make());
  EXPECT_THAT(first.step(batch).plan_deviation, HasSubstr("tanh"));
}

TEST_F(PlanFolder, GoesOnWithTheMicroBatchOfARunThatIsResumed) {
  const StepperOptions options{.budget = {.memory = Bytes(int64_t{1} << 30), .plan_folder = folder.path()}};
  PlannedTraining first(options);
  first.step(batch);
  const int64_t chosen = first.stepper.plan()->choice.items;  // by measured times
  const int64_t other = chosen == 512 ? 256 : 512;
  PlannedTraining resumed(options);
  resumed.stepper.load_state_dict(with_micro_batch(first.stepper.state_dict(), chosen, other));
  resumed.step(batch);
  EXPECT_EQ(resumed.stepper.plan()->choice.items, other);
}

// --- files that nobody should trust

TEST_F(PlanFolder, IgnoresADamagedFileSaysWhyAndReplacesIt) {
  const StepperOptions options{.micro_batch = 512, .budget = {.plan_folder = folder.path()}};
  const int64_t room = plain * 6 / 10;
  const Outcome first = one_step(batch, room, options);
  const auto path = only_file(folder);
  const std::string good = detail::FileSystem::real().read_file(path);
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return at == std::string::npos ? text : text.replace(at, from.size(), to);
  };
  const std::vector<std::string> bad = {"",
                                        "no JSON",
                                        good.substr(0, good.size() / 2),
                                        std::string(100'000, '['),
                                        with("\"snug_plan_file\":2", "\"snug_plan_file\":9"),
                                        with("\"holds_for\":\"", "\"holds_for\":\" "),
                                        with("\"batch\":512", "\"batch\":511.5"),
                                        with("\"batch\":512", "\"batch\":-1"),
                                        with("\"items\":512", "\"items\":0"),
                                        with("\"fixed_bytes\":", "\"fixed_bytes\":-"),
                                        with("\"left_free\":0", "\"left_free\":9000000000000000000"),
                                        with("\"effect_bytes\":0", "\"effect_bytes\":9000000000000000000"),
                                        with("\"peak_bytes\":", "\"peak_bytes\":1"),
                                        with("\"tensors\":[[6,[32]]", "\"tensors\":[[6,[-1]]")};
  for (const std::string& text : bad) {
    detail::replace_file(path, text);
    const Outcome second = one_step(batch, room, options);
    EXPECT_THAT(second.considered, HasSubstr("was not used")) << text.substr(0, 200);
    EXPECT_GT(second.calls, 1);
    EXPECT_EQ(second.state, first.state);
    EXPECT_THAT(one_step(batch, room, options).read_from, Not(IsEmpty())) << "it was replaced";
  }
}

TEST_F(PlanFolder, IsNoErrorWhereItCannotBeWritten) {
  detail::replace_file(folder / "file", "no folder");
  const Outcome first = one_step(batch, 2 * plain, {.budget = {.plan_folder = folder / "file"}});
  EXPECT_THAT(first.considered, HasSubstr("was not kept for the next program"));
}

}  // namespace
}  // namespace snug::plan_folder_test
