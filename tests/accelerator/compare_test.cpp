// `snug compare --device` on the simulated accelerator.

#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>

#include <CLI/CLI.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "program/command.h"
#include "program/measure/measure.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "tests/accelerator/accelerator.h"
#include "tests/support/temporary_folder.h"

namespace snug::compare_on_device_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::TemporaryFolder;
using ::testing::ThrowsMessage;

std::string name_of_device() { return c10::DeviceTypeName(testing::accelerator().type(), /*lower_case=*/true); }

void compare(const std::filesystem::path& out, const std::string& options) {
  CLI::App app;
  cli::add_compare(app);
  ::testing::internal::CaptureStdout();
  try {
    app.parse("compare --quick --pairs 1 --out " + out.string() + " " + options);
  } catch (...) {
    ::testing::internal::GetCapturedStdout();
    throw;
  }
  ::testing::internal::GetCapturedStdout();
}

std::string text_of(const std::filesystem::path& file) {
  std::ifstream stream(file);
  return {std::istreambuf_iterator<char>(stream), {}};
}

TEST(Largest, FindsTheEndFromWhereverItBegins) {
  constexpr int64_t kMost = 20;
  for (int64_t end = 0; end <= kMost; ++end) {
    for (int64_t expected = -1; expected <= kMost + 2; ++expected) {
      const auto works = [&](int64_t value) {
        EXPECT_TRUE(value >= 1 && value <= kMost) << value;
        return value <= end;
      };
      EXPECT_EQ(measure::largest(kMost, works, expected), end) << "from " << expected;
    }
  }
  int64_t tries = 0;
  EXPECT_EQ(measure::largest(1 << 14, [&](int64_t value) { return ++tries, value <= 5000; }, 5000), 5000);
  EXPECT_EQ(tries, 2);
}

TEST(CompareOnTheSimulatedDevice, CountsTheBytesOfTheDevice) {
  const TemporaryFolder folder;
  const auto here = folder / "here", there = folder / "there";
  compare(here, "precision --device cpu");
  compare(there, "precision --device " + name_of_device());
  EXPECT_THAT(text_of(there / "index.html"), HasSubstr(", device " + name_of_device()));
  // On the CPU bytes are counted as tensors ask for them, on the device in blocks.
  const auto dynamic_bytes = [](const std::filesystem::path& out, const std::string& device) {
    std::istringstream lines(text_of(out / "precision-dynamic.csv"));
    std::map<std::string, double> bytes;  // by recipe and batch
    for (std::string line; std::getline(lines, line);) {
      std::istringstream cells(line);
      std::string recipe, batch, count, label, measured_on;
      for (std::string* cell : {&recipe, &batch, &count, &label, &measured_on}) {
        std::getline(cells, *cell, ',');
      }
      if (recipe == "FP32") {  // autocast has other lists of operators on other devices
        EXPECT_EQ(measured_on, device);
        bytes[recipe + " " + batch] = std::stod(count);
      }
    }
    return bytes;
  };
  const auto on_cpu = dynamic_bytes(here, "cpu"), on_device = dynamic_bytes(there, name_of_device());
  ASSERT_EQ(on_cpu.size(), 4U);
  ASSERT_EQ(on_device.size(), 4U);
  EXPECT_NE(on_cpu, on_device);
  for (const auto& [what, bytes] : on_cpu) {
    EXPECT_NEAR(on_device.at(what), bytes, 0.05 * bytes) << what;
  }
}

TEST(CompareOnTheSimulatedDevice, ChangesNoBitByKeepingLess) {
  const TemporaryFolder folder;
  compare(folder / "page", "checkpointing --device " + name_of_device() + ":0");
  for (const char* model : {"gpt", "mlp", "resnet"}) {
    const std::string table = text_of(folder / "page" / ("checkpointing-" + std::string(model) + "-table.csv"));
    EXPECT_THAT(table, AllOf(HasSubstr("\"offload, to host memory\""),
                             HasSubstr("same bits," + name_of_device() + ":0"), Not(HasSubstr("not equal"))));
  }
  EXPECT_THAT(text_of(folder / "page" / "checkpointing-schedule.csv"), HasSubstr("again"));
}

TEST(CompareOnTheSimulatedDevice, RefusesWhatIsForTheCpu) {
  const TemporaryFolder folder;
  for (const std::string options : {"data-parallel", "python --results results.md"}) {
    EXPECT_THAT([&] { compare(folder / "page", options + " --device " + name_of_device()); },
                ThrowsMessage<ConfigError>(
                    AllOf(HasSubstr("compare: "), HasSubstr("CPU"), HasSubstr("without --device " + name_of_device()))))
        << options;
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "page"));
}

}  // namespace
}  // namespace snug::compare_on_device_test
