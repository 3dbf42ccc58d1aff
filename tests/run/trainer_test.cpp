#include "program/run/trainer.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "program/run/matmul_accumulation.h"
#include "program/run/run_records.h"
#include "snug/core.h"
#include "snug/precision.h"
#include "snug/schedule.h"
#include "snug/snapshot.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/temporary_folder.h"

namespace snug::trainer_test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using testing::FailingAllocation;
using ::testing::HasSubstr;
using testing::TemporaryFolder;
using ::testing::ThrowsMessage;

// A run of two steps of two sequences, with some text for it.
TrainConfig small_run(const TemporaryFolder& folder) {
  std::ofstream text(folder / "text.txt");
  for (int i = 0; i < 200; ++i) {
    text << "Scene " << i << ". Enter the " << i * 7 % 13 << "th gentleman.\n";
  }
  return {.data = {folder / "text.txt"}, .out = folder / "run", .batch = 2, .steps = 2, .snapshot_every = 1};
}

TrainConfig limited(TrainConfig config, const char* memory) {
  config.memory = Bytes::parse(memory);
  return config;
}

// The first allocation of run() fails.
void run_out_of_memory(const TrainConfig& config, Start start = Start::Fresh) {
  Trainer trainer(config, start);
  FailingAllocation first(1);
  first.arm();
  trainer.run({});
}

TrainConfig in(TrainConfig config, std::filesystem::path out) {
  config.out = std::move(out);
  return config;
}

void stop_after(int64_t step, const TrainConfig& config) {
  int64_t done = 0;
  Trainer(config, Start::Fresh)
      .run({.on_step = [&](const StepRecord& record) { done = record.step; },
            .stop_requested = [&] { return done == step; }});
}

// The first allocation after step 1 fails: that of its snapshot.
void run_out_of_memory_after_a_step(const TrainConfig& config) {
  Trainer trainer(config, Start::Fresh);
  FailingAllocation next(1);
  trainer.run({.on_step = [&](const StepRecord&) { next.arm(); }});
}

TEST(Trainer, SaysWhatDoesNotFitIntoTheLimit) {
  TemporaryFolder folder;
  TrainConfig config = limited(small_run(folder), "1GiB");
  const auto says = [](const char* what) {
    return ThrowsMessage<BudgetExceeded>(AllOf(HasSubstr(what), HasSubstr("does not fit into 1.00 GiB")));
  };
  EXPECT_THAT([&] { run_out_of_memory(config); }, says("step 1 "));
  EXPECT_FALSE(std::filesystem::exists(config.out));
  EXPECT_THAT([&] { run_out_of_memory_after_a_step(config); }, says("the snapshot of step 1 "));
  config.out = folder / "stopped";
  config.validate_every = 0;
  stop_after(1, config);
  config.steps = 1;  // so that nothing but its held-out loss is left to do
  EXPECT_THAT([&] { run_out_of_memory(config, Start::Resume); }, says("the held-out loss "));
  config.out = folder / "bfloat16";
  config.precision = Precision::BFloat16;
  EXPECT_THAT([&] { run_out_of_memory(config); }, says("the speed of 16 bits "));
}

TEST(Trainer, WithoutALimitPassesTheAllocatorsErrorOn) {
  TemporaryFolder folder;
  const TrainConfig config = small_run(folder);
  EXPECT_THROW(run_out_of_memory(config), c10::OutOfMemoryError);
  EXPECT_THROW(run_out_of_memory_after_a_step(config), c10::OutOfMemoryError);
}

// gpt-tiny's parameters take 3.1 MiB.
TEST(Trainer, TellsBeforeTheFirstStepThatGradientsAndOptimizerStateDoNotFit) {
  TemporaryFolder folder;
  const TrainConfig config = small_run(folder);
  for (const char* memory : {"1MiB", "4MiB", "8MiB", "12MiB"}) {
    EXPECT_THAT([&] { Trainer(limited(config, memory), Start::Fresh); },
                ThrowsMessage<BudgetExceeded>(HasSubstr(Bytes::parse(memory).str())))
        << memory;
  }
  Trainer(limited(config, "14MiB"), Start::Fresh);
  EXPECT_FALSE(std::filesystem::exists(config.out));
}

TEST(Trainer, RefusesADeviceThatIsNotThere) {
  TemporaryFolder folder;
  TrainConfig config = small_run(folder);
  for (const char* device : {"abacus", "cpu:1", "cuda:99", "cuda:257", "mps", "meta"}) {
    config.device = device;
    EXPECT_THAT([&] { Trainer(config, Start::Fresh); }, ThrowsMessage<ConfigError>(HasSubstr(device))) << device;
  }
}

TEST(Trainer, BeginsInAFolderThatHoldsNothingButTheRestOfALogThatWasNeverThere) {
  TemporaryFolder folder;
  TrainConfig config = small_run(folder);
  std::filesystem::create_directories(config.out);
  Trainer(config, Start::Fresh);
  std::ofstream(config.out / "log.jsonl.tmp-0123456789abcdef") << "{\"snug_r";
  EXPECT_TRUE(Trainer(config, Start::Fresh).run({}).finished);
  EXPECT_FALSE(std::filesystem::exists(config.out / "log.jsonl.tmp-0123456789abcdef"));
  EXPECT_THROW(Trainer(config, Start::Fresh), ConfigError);
  config.out = config.data.front();
  EXPECT_THROW(Trainer(config, Start::Fresh), ConfigError);
}

TEST(Trainer, ResumingAFinishedRunGivesItsHeldOutLoss) {
  TemporaryFolder folder;
  const TrainConfig config = small_run(folder);
  const TrainOutcome finished = Trainer(config, Start::Fresh).run({});
  const TrainOutcome again = Trainer(config, Start::Resume).run({});
  EXPECT_TRUE(again.finished);
  EXPECT_EQ(again.step, 2);
  EXPECT_EQ(again.validation_loss, finished.validation_loss);
}

TEST(Trainer, ResumesAFinishedRunWithoutMemoryForWhatItsLogHas) {
  TemporaryFolder folder;
  const TrainConfig config = limited(small_run(folder), "1GiB");
  const TrainOutcome finished = Trainer(config, Start::Fresh).run({});
  std::filesystem::remove(Trainer::model_path(config.out));  // as a kill leaves it
  Trainer again(config, Start::Resume);
  FailingAllocation first(1);
  first.arm();
  EXPECT_EQ(again.run({}).validation_loss, finished.validation_loss);
  EXPECT_TRUE(std::filesystem::exists(Trainer::model_path(config.out)));
}

TEST(Trainer, MeasuresTheHeldOutLossOfAnUnplannedRunOneByOne) {
  TemporaryFolder folder;
  TrainConfig config = limited(small_run(folder), "30MiB");
  config.batch = 64;
  config.validate_every = 0;
  stop_after(1, config);
  config.steps = 1;
  const TrainOutcome outcome = Trainer(config, Start::Resume).run({});
  EXPECT_TRUE(outcome.finished);
  EXPECT_GT(outcome.validation_loss, 0);
}

TEST(Trainer, LogsTheGradientNoiseScaleWhereTheBudgetSplitsTheBatch) {
  TemporaryFolder folder;
  TrainConfig config = limited(small_run(folder), "30MiB");
  config.batch = 64;
  config.validate_every = 0;
  stop_after(1, config);
  const StepRecord record = read_run_log(Trainer::log_path(config.out)).records.back();
  ASSERT_GT(record.micro_batches, 1);
  EXPECT_TRUE(record.gradient_noise_scale.has_value());
}

// A step needs the parameters four times, and its activations. Loading needs them three times.
TEST(Trainer, ResumesWithinTheLimitInWhichItTrains) {
  TemporaryFolder folder;
  const auto run = [&](const std::filesystem::path& out, const char* memory) {
    TrainConfig config = limited(in(small_run(folder), out), memory);
    config.batch = 1;
    return config;
  };
  const TrainConfig whole = run(folder / "whole", "15MiB");
  const TrainConfig stopped = run(folder / "stopped", "15MiB");
  const TrainOutcome expected = Trainer(whole, Start::Fresh).run({});
  stop_after(1, stopped);
  EXPECT_EQ(Trainer(stopped, Start::Resume).run({}).validation_loss, expected.validation_loss);
  std::filesystem::remove_all(Trainer::snapshots_path(stopped.out) / "step-00000002");
  const TrainConfig larger = run(stopped.out, "30MiB");
  EXPECT_EQ(Trainer(larger, Start::Resume).run({}).validation_loss, expected.validation_loss);
  const RunHistory history = read_run_log(Trainer::log_path(stopped.out));
  EXPECT_EQ(TrainConfig::from_settings(history.settings, stopped.out).memory, Bytes::parse("30MiB"));
}

TEST(Trainer, EndsWhenAParameterIsNotFiniteAndKeepsTheSnapshotsFromBefore) {
  TemporaryFolder folder;
  TrainConfig config = small_run(folder);
  config.steps = config.warmup_steps.emplace(8);
  config.lr = 1e38;
  EXPECT_THAT([&] { Trainer(config, Start::Fresh).run({}); },
              ThrowsMessage<NonFinite>(AllOf(HasSubstr("parameter '"), HasSubstr("--lr"))));
  const int64_t last = read_run_log(Trainer::log_path(config.out)).records.back().step;
  ASSERT_GT(last, 1);
  EXPECT_LT(last, 8);
  SnapshotStore store(Trainer::snapshots_path(config.out));
  EXPECT_EQ(store.latest(), last - 1);
}

TEST(Trainer, RefusesABatchThatThisMachineCannotHold) {
  TemporaryFolder folder;
  TrainConfig config = small_run(folder);
  for (const int64_t batch : {int64_t{1'000'000'000'000}, std::numeric_limits<int64_t>::max()}) {
    config.batch = batch;
    EXPECT_THAT([&] { Trainer(config, Start::Fresh); },
                ThrowsMessage<ConfigError>(HasSubstr(fmt::format("batch is {}", batch))));
  }
}

TEST(Trainer, LeavesItsOwnFilesOutOfTheText) {
  TemporaryFolder folder;
  TrainConfig config = small_run(folder);
  config.data = {folder.path()};
  stop_after(1, config);
  EXPECT_TRUE(Trainer(config, Start::Resume).run({}).finished);
}

TEST(Trainer, RefusesToResumeOnOtherText) {
  TemporaryFolder folder;
  const TrainConfig config = small_run(folder);
  Trainer(config, Start::Fresh).run({});
  std::fstream text(config.data.front(), std::ios::in | std::ios::out);
  text << "scene";  // as long as it was
  text.close();
  EXPECT_THAT([&] { Trainer(config, Start::Resume); },
              ThrowsMessage<ConfigError>(HasSubstr("are not those that the run")));
}

TEST(Trainer, ResumesOnTheSameTextAtAnotherPlace) {
  TemporaryFolder folder;
  TrainConfig config = small_run(folder);
  stop_after(1, config);
  const std::filesystem::path before = config.data.front();
  std::filesystem::rename(before, folder / "moved.txt");
  EXPECT_THAT([&] { Trainer(config, Start::Resume); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("there is no " + before.string()), HasSubstr("--data"))));
  config.data = {folder / "moved.txt"};
  EXPECT_TRUE(Trainer(config, Start::Resume).run({}).finished);
}

TEST(Trainer, ShowsWhatIsNoNumberWithoutASign) {
  const double nan = std::copysign(std::numeric_limits<double>::quiet_NaN(), -1);
  EXPECT_EQ(fmt::format("{}", detail::without_nan_sign(nan)), "nan");
  EXPECT_EQ(detail::without_nan_sign(-2.5), -2.5);
}

// After its first update the weights are so large that nothing is finite any more.
TrainConfig overflowing_run(const TemporaryFolder& folder) {
  TrainConfig config = small_run(folder);
  config.precision = Precision::Float16;
  config.lr = 1e30;
  config.warmup_steps = 4;
  config.batch = 1;  // FP16 is slow on a CPU
  return config;
}

TEST(Trainer, SkippedStepsDoNotAdvanceTheLearningRateNorDoesAResume) {
  TemporaryFolder folder;
  TrainConfig config = overflowing_run(folder);
  config.steps = 9;  // one more than is made: with these weights the held-out loss at the end is none
  const auto run = [&](Start start, int64_t until) {
    std::vector<StepRecord> records;
    Trainer(config, start)
        .run({.on_step = [&](const StepRecord& record) { records.push_back(record); },
              .stop_requested = [&] { return records.back().step == until; }});
    return records;
  };
  auto records = run(Start::Fresh, 5);
  for (const StepRecord& record : run(Start::Resume, 8)) {
    records.push_back(record);
  }
  ASSERT_EQ(records.size(), 8u);
  int64_t updates = 0;
  for (const StepRecord& record : records) {
    const WarmupCosine schedule{.peak = 1e30, .warmup_steps = 4, .total_steps = 9, .floor = 1e29};
    EXPECT_EQ(record.learning_rate, schedule.at(updates)) << record.step;
    updates += record.stepped ? 1 : 0;
  }
  EXPECT_GT(updates, 0);
  EXPECT_LT(updates, 4);
}

TEST(Trainer, AFloat16RunThatOverflowsForEverEndsInAnErrorThatNamesAParameter) {
  TemporaryFolder folder;
  TrainConfig config = overflowing_run(folder);
  config.steps = 40;
  EXPECT_THAT([&] { Trainer(config, Start::Fresh).run({}); },
              ThrowsMessage<NonFinite>(AllOf(HasSubstr("32 steps in a row were skipped"), HasSubstr(".weight"))));
}

TEST(Trainer, WritesWhatThePrecisionGuardDecidesIntoTheRunLog) {
  TemporaryFolder folder;
  TrainConfig config = overflowing_run(folder);
  config.steps = 8;
  config.precision_guard = 3;
  std::vector<std::string> notes;
  const auto run = [&] {
    Trainer(config, Start::Fresh).run({.on_note = [&](const std::string& note) { notes.push_back(note); }});
  };
  EXPECT_THAT(run, ThrowsMessage<NonFinite>(HasSubstr("held-out loss")));
  std::vector<std::string> logged;
  for (const RunEvent& event : read_run_log(Trainer::log_path(config.out)).events) {
    if (event.name == "precision") {
      logged.push_back(fmt::format("step {}: {}", event.step, std::get<std::string>(event.details.front().second)));
    }
  }
  ASSERT_FALSE(logged.empty());
  EXPECT_THAT(logged.front(), HasSubstr("goes to float32: non-finite gradients for 3 steps"));
  EXPECT_THAT(notes, ::testing::IsSupersetOf(logged));
}

// Text of one letter but for a thousand bytes: in a batch of these the loss is far above all others.
TrainConfig run_with_a_spike(const TemporaryFolder& folder) {
  std::ofstream text(folder / "text.txt");
  std::mt19937 random(1);
  text << std::string(60000, 'a');
  for (int i = 0; i < 1000; ++i) {
    text << static_cast<char>(random() % 256);
  }
  text << std::string(30000, 'a');
  return {.data = {folder / "text.txt"},
          .out = folder / "run",
          .batch = 1,
          .lr = 0.003,
          .steps = 60,
          .warmup_steps = 0,
          .validate_every = 0,
          .snapshot_every = 5,
          .on_spike = OnSpike::RollBack};
}

TEST(Trainer, HasTheMachineOfTheStepsToComeInItsLogWhereItGoesBackBehindItsResumption) {
  const TemporaryFolder folder;
  TrainConfig config = run_with_a_spike(folder);
  Trainer(in(config, folder / "whole"), Start::Fresh).run({});
  const RunHistory whole = read_run_log(Trainer::log_path(folder / "whole"));
  const RunEvent* back = newest_event(whole, "roll back", config.steps);
  ASSERT_NE(back, nullptr);
  const int64_t resumed = back->step;
  ASSERT_GT(resumed, 5) << "there is no older snapshot to go back to";
  stop_after(resumed, config);
  const int threads = at::get_num_threads();
  const auto put_back = c10::make_scope_exit([&] { at::set_num_threads(threads); });
  at::set_num_threads(threads + 1);
  Trainer(config, Start::Resume).run({.on_step = [&](const StepRecord& record) {
    if (record.step == resumed + 1) {
      std::filesystem::remove(Trainer::snapshots_path(config.out) / fmt::format("step-{:08}", resumed) /
                              "manifest.json");
    }
  }});
  const RunHistory log = read_run_log(Trainer::log_path(config.out));
  ASSERT_NE(newest_event(log, "roll back", config.steps), nullptr);
  EXPECT_LT(newest_event(log, "roll back", config.steps)->step, resumed);
  const RunEvent* machine = newest_event(log, "machine", config.steps);
  ASSERT_NE(machine, nullptr);
  EXPECT_THAT(machine->details, Contains(std::pair<std::string, LogValue>("threads", int64_t{threads + 1})));
}

TEST(Trainer, SaysInTheRunLogThatMatrixProductsSumInFp32AndWithoutTf32) {
  TemporaryFolder folder;
  detail::accumulate_matmuls_in_fp32(/*allow_tf32=*/true);  // what another part of a program may have set
  Trainer(small_run(folder), Start::Fresh).run({});
  std::vector<RunEvent> said;
  for (const RunEvent& event : read_run_log(Trainer::log_path(folder / "run")).events) {
    if (event.name == "matrix products") {
      said.push_back(event);
    }
  }
  ASSERT_EQ(said.size(), 1u);
  EXPECT_EQ(said[0].step, 0);
  std::vector<std::string> settings;
  for (const auto& [name, value] : said[0].details) {
    settings.push_back(name);
    EXPECT_FALSE(std::get<bool>(value)) << name;
  }
  EXPECT_THAT(settings, ::testing::ElementsAre("fp16_reduction", "bf16_reduction", "fp16_accumulation", "tf32"));
  EXPECT_FALSE(detail::matmul_accumulation().tf32) << "and it is so";
}

}  // namespace
}  // namespace snug::trainer_test
