// The program on an accelerator: devices by name, `snug plan --device` and what `snug train --device` is made of.

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <ATen/DeviceAccelerator.h>
#include <CLI/CLI.hpp>
#include <c10/util/ScopeExit.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "program/command.h"
#include "program/run/device.h"
#include "program/run/run_model.h"
#include "program/run/trainer.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "src/core/file_system.h"
#include "src/step/check_options.h"
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

int64_t weight_bytes() {
  int64_t bytes = 0;
  for (const at::Tensor& parameter : run_model({.model = TrainConfig().model}, torch::kCPU).module->parameters()) {
    bytes += static_cast<int64_t>(parameter.nbytes());
  }
  return bytes;
}

// In the second case the device has no room for the weights themselves.
TEST(PlanOnAnAccelerator, ChoosesWithinFewerBytesThanTheWeightsTakeWithOffload) {
  SNUG_SKIP_UNLESS_SIMULATED();
  const Bytes budget = live_bytes(testing::accelerator()) + Bytes(weight_bytes() * 9 / 10);
  const std::string options = fmt::format("{} --memory {}", kind(), budget.count());
  EXPECT_THAT([&] { plan(options); }, ThrowsMessage<BudgetExceeded>(HasSubstr("would do")));
  EXPECT_THAT(plan(options + " --offload"), HasSubstr("to the host's memory"));
  const MemoryLimit limit(testing::accelerator(), budget);
  EXPECT_THAT(plan(options + " --offload"), HasSubstr("to the host's memory"));
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
  const int64_t batch = sim_device::is_present() ? 4 : 64;  // what CUDA's libraries keep is more than a small one takes
  return {.data = {folder / "text.txt"}, .out = out, .batch = batch, .memory = memory, .steps = 2, .device = device};
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

// What is said when the second step is made on another device, and the loss of that step.
struct Resumed {
  std::vector<std::string> said;
  double loss = 0;
};

Resumed resumed(const TemporaryFolder& folder, const std::string& from, const std::string& to) {
  TrainConfig config = two_steps(folder, from, Bytes::unlimited());
  stop_after_a_step(config);
  config.device = to;
  Resumed now;
  const TrainOutcome outcome = Trainer(config, Start::Resume)
                                   .run({.on_step = [&](const StepRecord& record) { now.loss = record.loss; },
                                         .on_note = [&](const std::string& note) { now.said.push_back(note); }});
  EXPECT_TRUE(outcome.finished);
  return now;
}

TEST(RunOnAnAccelerator, GoesOnWithARunOfTheCpuAndTheCpuWithItsAndBothSaySo) {
  const TemporaryFolder folder;
  const Steps whole = train(folder, kind(), Bytes::unlimited());
  const std::string first = kind() + ":0";
  const Resumed there = resumed(folder, "cpu", first);
  EXPECT_NEAR(there.loss, whole.losses[1], 1e-3);
  EXPECT_THAT(there.said, Contains(HasSubstr("goes on with device " + first + ", not cpu, where random numbers")));
  const Resumed here = resumed(folder, first, "cpu");
  EXPECT_NEAR(here.loss, whole.losses[1], 1e-3);
  EXPECT_THAT(here.said, Contains(HasSubstr("goes on with device cpu, not " + first)));
}

TEST(RunOnAnAccelerator, TellsOneDeviceOfAKindFromAnother) {
  if (at::accelerator::deviceCount() < 2) {
    GTEST_SKIP() << "there is one device";
  }
  const TemporaryFolder folder;
  EXPECT_THAT(resumed(folder, kind(), kind() + ":0").said, Not(Contains(HasSubstr("last bits"))));
  const auto put_back = c10::make_scope_exit([] { at::accelerator::setDeviceIndex(0); });
  const std::string first = kind() + ":0", second = kind() + ":1";
  EXPECT_THAT(resumed(folder, first, second).said, Contains(HasSubstr("device " + second + ", not " + first)));
}

// AdamW8bit has no kernel for devices.
TEST(RunOnAnAccelerator, TrainsWithAnOptimizerWhoseUpdatesTheCpuMakesAndGoesOnOnTheCpu) {
  for (const Weights weights : {Weights::Full, Weights::Low}) {
    const TemporaryFolder folder;
    const auto steps_on = [&](const std::string& device) {
      TrainConfig config = two_steps(folder, device, Bytes::unlimited());
      config.optimizer = OptimizerChoice::AdamW8bit;
      config.weights = weights;
      config.precision = weights == Weights::Low ? Precision::BFloat16 : Precision::Float32;
      std::vector<double> losses;
      stop_after_a_step(config);
      for (const std::string& then : {device, std::string("cpu")}) {
        config.device = then;
        config.steps = static_cast<int64_t>(losses.size()) + 2;
        Trainer(config, Start::Resume).run({.on_step = [&](const StepRecord& record) {
          losses.push_back(record.loss);
        }});
      }
      return losses;
    };
    const std::vector<double> there = steps_on(kind()), here = steps_on("cpu");
    ASSERT_EQ(there.size(), 2);
    const bool has_bits_of_cpu = sim_device::is_present() && weights == Weights::Full;
    for (size_t step = 0; step < 2; ++step) {
      EXPECT_NEAR(there[step], here[step], has_bits_of_cpu ? 0 : 1e-2) << step;
    }
  }
}

// The weights alone take more than the limit, so that the model never was on the device.
TEST(RunOnAnAccelerator, TrainsAModelLargerThanTheDeviceWithOffload) {
  SNUG_SKIP_UNLESS_SIMULATED();
  const TemporaryFolder folder;
  TrainConfig config =
      two_steps(folder, kind() + ":0", live_bytes(testing::accelerator()) + Bytes(weight_bytes() * 9 / 10));
  EXPECT_THAT([&] { Trainer(config, Start::Fresh).run({}); }, ThrowsMessage<BudgetExceeded>(HasSubstr("--offload")));
  config.offload = true;
  config.micro_batch = 1;
  const auto steps_of = [](const TrainConfig& with) {
    Steps steps;
    Trainer(with, Start::Fresh).run({.on_step = [&](const StepRecord& record) {
      steps.losses.push_back(record.loss);
      steps.peak_bytes = std::max(steps.peak_bytes, record.peak_bytes);
    }});
    return steps;
  };
  const Steps steps = steps_of(config);
  EXPECT_LE(steps.peak_bytes, config.memory.count());
  TrainConfig plain = two_steps(folder, kind() + ":0", Bytes::unlimited());
  plain.micro_batch = 1;
  const Steps plain_steps = steps_of(plain);
  EXPECT_EQ(steps.losses, plain_steps.losses);

  // A snapshot with the weights on the host, and a run that goes on with the snapshot.
  config.out = folder / "resumed";
  stop_after_a_step(config);
  std::vector<double> resumed;
  Trainer(config, Start::Resume).run({.on_step = [&](const StepRecord& record) { resumed.push_back(record.loss); }});
  EXPECT_EQ(resumed, std::vector<double>{plain_steps.losses.back()});
}

TEST(PlansOnAnAccelerator, AreNotThoseOfTheCpu) {
  torch::nn::Linear model(2, 2);
  const torch::optim::SGD optimizer(model->parameters(), 0.1);
  const auto described = [&] {
    return detail::describe_stepper(*model, optimizer, {}, {}, Precision::Float32, Bytes::parse("1MiB"));
  };
  const std::string here = described();
  move_to(*model, testing::accelerator());
  EXPECT_NE(described(), here);
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
