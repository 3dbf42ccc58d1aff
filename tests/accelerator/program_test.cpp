// The program on an accelerator: devices by name, `snug plan --device` and what `snug train --device` is made of.

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "cli/command.h"
#include "snug/core/error.h"
#include "snug/core/file_system.h"
#include "snug/run/device.h"
#include "snug/run/trainer.h"
#include "tests/accelerator/accelerator.h"
#include "tests/support/temporary_folder.h"

namespace snug::program_test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::TemporaryFolder;
using ::testing::ThrowsMessage;

std::string kind() { return c10::DeviceTypeName(testing::accelerator().type(), /*lower_case=*/true); }

TEST(ParseDeviceOnAnAccelerator, KnowsItWithAndWithoutAnIndex) {
  EXPECT_EQ(parse_device("test", "cpu"), c10::Device(torch::kCPU));
  EXPECT_EQ(parse_device("test", kind()), c10::Device(testing::accelerator().type()));
  EXPECT_EQ(parse_device("test", kind() + ":0"), c10::Device(testing::accelerator().type(), 0));
}

TEST(ParseDeviceOnAnAccelerator, NamesTheDevicesThatAreThere) {
  for (const std::string& name : {kind() + ":99", kind() + ":257", kind() + ":", std::string("meta"), std::string()}) {
    EXPECT_THAT([&] { parse_device("test", name); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr("test: "), HasSubstr("'" + name + "'"),
                                                 HasSubstr("cpu, " + kind() + ", " + kind() + ":0"))));
  }
}

std::string plan(const std::string& options) {
  CLI::App app;
  cli::add_plan(app);
  ::testing::internal::CaptureStdout();
  try {
    app.parse("plan --batch 2 --device " + options);
  } catch (...) {
    ::testing::internal::GetCapturedStdout();
    throw;
  }
  return ::testing::internal::GetCapturedStdout();
}

TEST(PlanOnAnAccelerator, ShowsTheCurveOfTheDeviceAndItsUnits) {
  const std::string shown = plan(kind());
  EXPECT_THAT(shown, AllOf(HasSubstr("100.0 %"), HasSubstr("The plain step takes"), HasSubstr("allocator of " + kind()),
                           HasSubstr("blocks of 512")));
  EXPECT_THAT(plan("cpu"), Not(HasSubstr("blocks of 512")));
}

TEST(PlanOnAnAccelerator, ChoosesWithinABudget) {
  EXPECT_THAT(plan(kind() + " --memory 1GiB"), AllOf(HasSubstr("It fits as it is"), HasSubstr("blocks of 512")));
  EXPECT_THAT([] { plan(kind() + " --memory 1MiB"); }, ThrowsMessage<BudgetExceeded>(HasSubstr("would do")));
}

struct Steps {
  std::vector<double> losses;
  int64_t peak_bytes = 0;
};

TrainConfig two_steps(const TemporaryFolder& folder, const std::string& device, Bytes memory) {
  std::ofstream text(folder / "text.txt");
  for (int i = 0; i < 200; ++i) {
    text << "Scene " << i << ". Enter the " << i * 7 % 13 << "th gentleman.\n";
  }
  const auto out = folder / ("run-" + device + memory.str());
  return {.data = {folder / "text.txt"}, .out = out, .batch = 4, .memory = memory, .steps = 2, .device = device};
}

Steps train(const TemporaryFolder& folder, const std::string& device, Bytes memory) {
  Steps steps;
  Trainer trainer(two_steps(folder, device, memory), Start::Fresh);
  trainer.run({.on_step = [&](const StepRecord& record) {
    steps.losses.push_back(record.loss);
    steps.peak_bytes = std::max(steps.peak_bytes, record.peak_bytes);
  }});
  return steps;
}

TEST(RunOnAnAccelerator, RunsAsOnTheCpu) {
  const TemporaryFolder folder;
  const Steps there = train(folder, kind(), Bytes::unlimited());
  const Steps here = train(folder, "cpu", Bytes::unlimited());
  ASSERT_EQ(there.losses.size(), 2);
  EXPECT_NEAR(there.losses[0], here.losses[0], 1e-5);
  EXPECT_NEAR(there.losses[1], here.losses[1], 1e-3);
}

void stop_after_a_step(const TrainConfig& config) {
  Trainer(config, Start::Fresh).run({.stop_requested = [] { return true; }});
}

TEST(RunOnAnAccelerator, GoesOnWithARunOfTheCpuAndSaysSo) {
  const TemporaryFolder folder;
  const Steps whole = train(folder, kind(), Bytes::unlimited());
  TrainConfig config = two_steps(folder, "cpu", Bytes::unlimited());
  stop_after_a_step(config);
  config.device = kind();
  std::vector<std::string> said;
  std::vector<double> losses;
  Trainer(config, Start::Resume)
      .run({.on_step = [&](const StepRecord& record) { losses.push_back(record.loss); },
            .on_note = [&](const std::string& note) { said.push_back(note); }});
  ASSERT_EQ(losses.size(), 1);
  EXPECT_NEAR(losses[0], whole.losses[1], 1e-3);
  EXPECT_THAT(said, Contains(HasSubstr("device " + kind() + ", not cpu")));
}

TEST(RunOnAnAccelerator, OfOneThatStoppedGoesOnOnTheCpu) {
  const TemporaryFolder folder;
  TrainConfig config = two_steps(folder, kind() + ":0", Bytes::unlimited());
  stop_after_a_step(config);
  config.device = "cpu";
  std::vector<std::string> said;
  EXPECT_TRUE(
      Trainer(config, Start::Resume).run({.on_note = [&](const std::string& note) { said.push_back(note); }}).finished);
  EXPECT_THAT(said, Contains(HasSubstr("goes on with device cpu, not " + kind() + ": ")));
}

TEST(RunOnAnAccelerator, GoesOnOnAnotherDeviceOfItsKindWithoutANote) {
  const TemporaryFolder folder;
  TrainConfig config = two_steps(folder, kind(), Bytes::unlimited());
  stop_after_a_step(config);
  config.device = kind() + ":0";
  Trainer(config, Start::Resume).run({.on_note = [&](const std::string& note) {
    EXPECT_THAT(note, Not(HasSubstr("last bits")));
  }});
}

TEST(RunOnAnAccelerator, IsRefusedBeforeItsFirstStepWithAnOptimizerOfTheCpuAndItsLogIsNotTouched) {
  const TemporaryFolder folder;
  TrainConfig config = two_steps(folder, "cpu", Bytes::unlimited());
  config.optimizer = OptimizerChoice::AdamW8bit;
  stop_after_a_step(config);
  const std::string log = FileSystem::real().read_file(Trainer::log_path(config.out));
  config.device = kind();
  EXPECT_THAT([&] { Trainer(config, Start::Resume); },
              ThrowsMessage<ConfigError>(HasSubstr("adamw8bit runs on the CPU only, and the device is " + kind())));
  EXPECT_EQ(FileSystem::real().read_file(Trainer::log_path(config.out)), log);
}

TEST(RunOnAnAccelerator, KeepsALimitByAPlan) {
  const TemporaryFolder folder;
  const Steps plain = train(folder, kind() + ":0", Bytes::unlimited());
  const Bytes limit(plain.peak_bytes * 3 / 4);
  const Steps planned = train(folder, kind() + ":0", limit);
  EXPECT_EQ(planned.losses, plain.losses);
  EXPECT_LE(planned.peak_bytes, limit.count());
}

}  // namespace
}  // namespace snug::program_test
