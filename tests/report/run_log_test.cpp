#include "program/report/run_log.h"

#include <bit>
#include <cmath>
#include <limits>

#include <gtest/gtest.h>

#include "snug/core.h"
#include "src/core/file_system.h"
#include "tests/support/failing_file_system.h"
#include "tests/support/file_size_limit.h"
#include "tests/support/null_file_system.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/unsynced_file_system.h"

namespace snug::run_log_test {
namespace {

using std::filesystem::path;
using testing::FailingFileSystem;
using testing::FileSizeLimit;
using testing::NullFileSystem;
using testing::TemporaryFolder;
using testing::unsynced_files;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

const LogValues kSettings{{"model", "gpt"}, {"seed", int64_t{7}}, {"lr", 3e-4}, {"offload", true}};
const RunEvent kFirstEvent{.name = "matrix products", .details = {{"tf32", false}}};

StepRecord example_record(int64_t step) {
  return {
      .step = step,
      .loss = 4.0 / static_cast<double>(step + 2),
      .validation_loss = step % 2 == 0 ? std::optional(1.0 / 3) : std::nullopt,
      .learning_rate = 0.1 + 0.2,
      .grad_norm = 1e-310,
      .gradient_noise_scale = 12.5,
      .loss_scale = 65536,
      .stepped = step != 3,
      .items = 8192,
      .micro_batches = 4,
      .peak_bytes = int64_t{5} << 33,
      .activation_peak_bytes = 123,
      .memory = {.parameters = 1, .gradients = 2, .optimizer_state = 3, .activations = 4, .workspace = 5, .other = 6},
      .communication =
          step % 2 == 0 ? std::optional(Communication{.bytes_sent = 7, .seconds = 0.3, .waited = 0.1}) : std::nullopt,
      .seconds = 0.123456789012345678,
      .items_per_second = 66376.3};
}

std::string content_of(const path& file) { return detail::FileSystem::real().read_file(file); }

void write_content(const path& file, std::string_view content) {
  std::filesystem::remove(file);  // some file systems wait for the disk when a file is overwritten
  unsynced_files().write_file(file, std::span(&content, 1));
}

// A log with settings, steps 1 to 6 and an event after step 4; returns its text.
std::string write_example(const path& file) {
  RunLog log = RunLog::create(file, kSettings);
  for (int64_t step = 1; step <= 6; ++step) {
    log.write(example_record(step));
    if (step == 4) {
      log.event({.name = "snapshot", .step = 4, .details = {{"file", "step-4"}}});
    }
  }
  return content_of(file);
}

template <class E, class Call>
std::string error_of(Call call) {
  try {
    call();
    return "no error";
  } catch (const E& error) {
    return error.what();
  }
}

void expect_contains(const std::string& text, std::string_view part) {
  EXPECT_NE(text.find(part), std::string::npos) << text << "\nlacks: " << part;
}

TEST(RunLog, ReadsBackEverythingThatWasWritten) {
  TemporaryFolder folder;
  write_example(folder / "log");
  const RunHistory history = read_run_log(folder / "log");
  EXPECT_EQ(history.settings, kSettings);
  ASSERT_EQ(history.records.size(), 6u);
  for (int64_t step = 1; step <= 6; ++step) {
    EXPECT_EQ(history.records[static_cast<size_t>(step - 1)], example_record(step)) << step;
  }
  const RunEvent expected{.name = "snapshot", .step = 4, .details = {{"file", "step-4"}}};
  EXPECT_EQ(history.events, std::vector<RunEvent>{expected});
}

TEST(RunLog, WritesOneLineOfPlainJsonPerStep) {
  TemporaryFolder folder;
  RunLog log = RunLog::create(folder / "log", {{"lr", 0.5}});
  log.write({.step = 1, .loss = 2.5, .learning_rate = 1e-3, .items = 3});
  EXPECT_EQ(content_of(folder / "log"),
            R"({"snug_run":1,"settings":{"lr":0.5}})"
            "\n"
            R"({"step":1,"loss":2.5,"learning_rate":0.001,"grad_norm":0.0,"loss_scale":1.0,)"
            R"("stepped":true,"items":3,"micro_batches":1,"peak_bytes":0,)"
            R"("activation_peak_bytes":0,"memory":{"parameters":0,"gradients":0,)"
            R"("optimizer_state":0,"activations":0,"workspace":0,"other":0},)"
            R"("seconds":0.0,"items_per_second":0.0})"
            "\n");
}

TEST(RunLog, KeepsEveryBitOfEveryDouble) {
  TemporaryFolder folder;
  RunLog log = RunLog::create(folder / "log", {});
  std::vector<double> values{0.0,
                             -0.0,
                             0.1,
                             1.0 / 3,
                             std::numeric_limits<double>::denorm_min(),
                             std::numeric_limits<double>::min(),
                             std::numeric_limits<double>::max(),
                             std::numeric_limits<double>::lowest(),
                             9007199254740993.0,
                             5e-324,
                             1e23,
                             123456789.0,
                             kInf,
                             -kInf};
  uint64_t bits = 1;
  while (values.size() < 3000) {
    bits = bits * 6364136223846793005u + 1442695040888963407u;
    const auto value = std::bit_cast<double>(bits);
    if (!std::isnan(value)) {
      values.push_back(value);
    }
  }
  for (const double value : values) {
    log.write({.loss = value});
  }
  const RunHistory history = read_run_log(folder / "log");
  ASSERT_EQ(history.records.size(), values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(std::bit_cast<uint64_t>(history.records[i].loss), std::bit_cast<uint64_t>(values[i])) << values[i];
  }
}

TEST(RunLog, SpellsNanAndInfinitiesAsStringsAndReadsThemBack) {
  TemporaryFolder folder;
  RunLog log = RunLog::create(folder / "log", {{"clip", kInf}});
  log.write({.step = 1, .loss = kNan, .validation_loss = kNan, .grad_norm = kInf, .seconds = -kInf});
  const std::string content = content_of(folder / "log");
  expect_contains(content, R"("loss":"nan")");
  expect_contains(content, R"("grad_norm":"inf")");
  expect_contains(content, R"("seconds":"-inf")");
  const RunHistory history = read_run_log(folder / "log");
  EXPECT_TRUE(std::isnan(history.records.at(0).loss));
  EXPECT_TRUE(std::isnan(history.records.at(0).validation_loss.value()));
  EXPECT_EQ(history.records.at(0).grad_norm, kInf);
  EXPECT_EQ(history.records.at(0).seconds, -kInf);
}

TEST(RunLog, SurvivesTextThatJsonCannotHold) {
  TemporaryFolder folder;
  RunLog log = RunLog::create(folder / "log", {{"data", "a\xff\n\"\\\t\x01"}, {"\xc3", "\xed\xa0\x80"}});
  log.event({.name = "line\nbreak", .step = 0});
  const RunHistory history = read_run_log(folder / "log");
  EXPECT_EQ(std::get<std::string>(history.settings.at(0).second), "a\uFFFD\n\"\\\t\x01");
  EXPECT_EQ(history.settings.at(1).first, "\uFFFD");
  EXPECT_EQ(history.events.at(0).name, "line\nbreak");
}

TEST(RunLog, RefusesToOverwriteAndLeavesTheOldLogAlone) {
  TemporaryFolder folder;
  const std::string before = write_example(folder / "log");
  expect_contains(error_of<ConfigError>([&] { (void)RunLog::create(folder / "log", {}); }), "exists already");
  EXPECT_EQ(content_of(folder / "log"), before);
}

TEST(RunLog, RefusesNamesThatWouldHideOthers) {
  TemporaryFolder folder;
  const LogValues twice{{"lr", 1.0}, {"lr", 2.0}};
  expect_contains(error_of<ConfigError>([&] { (void)RunLog::create(folder / "log", twice); }), "\"lr\" is there twice");
  EXPECT_TRUE(detail::FileSystem::real().list(folder.path()).empty());
  RunLog log = RunLog::create(folder / "log", {});
  EXPECT_THROW(log.event({.name = "x", .step = 1, .details = {{"step", int64_t{2}}}}), ConfigError);
}

TEST(RunLog, HandsEveryLineToTheSystemAtOnce) {
  TemporaryFolder folder;
  RunLog log = RunLog::create(folder / "log", kSettings);
  for (int64_t step = 1; step <= 3; ++step) {
    log.write(example_record(step));
    EXPECT_EQ(read_run_log(folder / "log").records.size(), static_cast<size_t>(step));
  }
  log.sync();
}

TEST(RunLog, GoesOnAfterBeingMoved) {
  TemporaryFolder folder;
  RunLog first = RunLog::create(folder / "log", {});
  RunLog second = std::move(first);
  RunLog third = RunLog::create(folder / "other", {});
  third = std::move(second);
  third.write(example_record(1));
  EXPECT_EQ(read_run_log(folder / "log").records.size(), 1u);
  EXPECT_TRUE(read_run_log(folder / "other").records.empty());
}

TEST(RunLog, CutsBackToTheLastStepAndThenAppends) {
  TemporaryFolder folder;
  const std::string full = write_example(folder / "log");
  {
    RunLog log = RunLog::resume(folder / "log", 4);
    const RunHistory cut = read_run_log(folder / "log");
    EXPECT_EQ(cut.records.back().step, 4);
    EXPECT_EQ(cut.events.size(), 1u);
    EXPECT_EQ(cut.settings, kSettings);
    log.write(example_record(5));
    log.write(example_record(6));
  }
  EXPECT_EQ(content_of(folder / "log"), full);
  EXPECT_EQ(detail::FileSystem::real().list(folder.path()), std::vector<std::string>{"log"});
}

TEST(RunLog, TakesOtherValuesOfSettingsWhenItIsResumed) {
  TemporaryFolder folder;
  RunLog::create(folder / "log", {{"memory", "15"}, {"lr", 0.5}}).write(example_record(1));
  RunLog::resume(folder / "log", 1, detail::FileSystem::real(), {{"memory", "30"}, {"unknown", true}});
  const RunHistory history = read_run_log(folder / "log");
  EXPECT_EQ(history.settings, (LogValues{{"memory", "30"}, {"lr", 0.5}}));
  EXPECT_EQ(history.records.size(), 1u);
}

TEST(RunLog, DropsEventsAfterTheLastStepAndKeepsOnlySettingsAtStepZero) {
  TemporaryFolder folder;
  write_example(folder / "log");
  RunLog::resume(folder / "log", 3);
  EXPECT_TRUE(read_run_log(folder / "log").events.empty());
  RunLog::resume(folder / "log", 0);
  EXPECT_TRUE(read_run_log(folder / "log").records.empty());
  EXPECT_EQ(read_run_log(folder / "log").settings, kSettings);
}

TEST(RunLog, ResumesAfterAKillAtAnyByte) {
  TemporaryFolder folder;
  const std::string full = write_example(folder / "log");
  for (size_t length = full.find('\n') + 1; length <= full.size(); ++length) {
    write_content(folder / "log", std::string_view(full).substr(0, length));
    const auto steps = static_cast<int64_t>(read_run_log(folder / "log").records.size());
    const bool at_a_line_end = full[length - 1] == '\n' || (length < full.size() && full[length] == '\n');
    if (length % 53 != 0 && !at_a_line_end) {
      continue;  // replacing a file takes its time on many file systems
    }
    RunLog log = RunLog::resume(folder / "log", 2, unsynced_files());
    for (int64_t step = std::min<int64_t>(steps, 2) + 1; step <= 6; ++step) {
      log.write(example_record(step));
    }
    const RunHistory history = read_run_log(folder / "log");
    ASSERT_EQ(history.records.size(), 6u) << "cut at " << length;
    for (int64_t step = 1; step <= 6; ++step) {
      ASSERT_EQ(history.records[static_cast<size_t>(step - 1)], example_record(step)) << "cut at " << length;
    }
  }
}

TEST(RunLog, LeavesTheOldLogOrTheNewOneWhicheverOperationFails) {
  TemporaryFolder folder;
  const std::string full = write_example(folder / "log");
  FailingFileSystem counter({}, unsynced_files());
  RunLog::resume(folder / "log", 4, counter);
  const std::string cut = content_of(folder / "log");
  ASSERT_GE(counter.operations(), 3);  // write, rename, sync
  for (const bool dead : {false, true}) {
    for (int64_t fault = 1; fault <= counter.operations(); ++fault) {
      write_content(folder / "log", full);
      FailingFileSystem files({.fail_at = fault, .then_dead = dead}, unsynced_files());
      EXPECT_THROW(RunLog::resume(folder / "log", 4, files), Error) << fault;
      const std::string left = content_of(folder / "log");
      EXPECT_TRUE(left == full || left == cut) << fault;
      RunLog::resume(folder / "log", 4, unsynced_files());
      EXPECT_EQ(content_of(folder / "log"), cut) << fault;
    }
  }
}

TEST(RunLog, CreatesTheSettingsWithTheFirstEventsOrNothing) {
  TemporaryFolder folder;
  for (int64_t fault = 1; fault <= 2; ++fault) {
    FailingFileSystem files({.fail_at = fault});
    EXPECT_THROW(RunLog::create(folder / "log", kSettings, {kFirstEvent}, files), Error);
    EXPECT_TRUE(files.list(folder.path()).empty()) << fault;
  }
  FailingFileSystem files({});
  (void)RunLog::create(folder / "log", kSettings, {kFirstEvent}, files);
  EXPECT_EQ(files.operations(), 3);
  const RunHistory history = read_run_log(folder / "log");
  EXPECT_EQ(history.settings, kSettings);
  EXPECT_EQ(history.events, std::vector{kFirstEvent});
}

TEST(RunLog, ReportsAFullDisk) {
  if (!std::filesystem::exists("/dev/full")) {
    GTEST_SKIP() << "needs /dev/full";
  }
  TemporaryFolder folder;
  // The log's name leads to a device that is always full, as soon as the settings are in place.
  class Redirecting final : public NullFileSystem {
   public:
    void rename(const Path&, const Path& to) override { std::filesystem::create_symlink("/dev/full", to); }
  } files;
  RunLog log = RunLog::create(folder / "log", {}, {}, files);
  const std::string error = error_of<Error>([&] { log.write(example_record(1)); });
  expect_contains(error, (folder / "log").string());
  expect_contains(error, "No space left on device");
}

TEST(RunLog, TakesBackALineThatDidNotFit) {
  TemporaryFolder folder;
  RunLog log = RunLog::create(folder / "log", kSettings);
  log.write(example_record(1));
  const std::string before = content_of(folder / "log");
  {
    FileSizeLimit limit(before.size() + 20);
    EXPECT_THROW(log.write(example_record(2)), Error);
  }
  EXPECT_EQ(content_of(folder / "log"), before);
  log.write(example_record(3));
  EXPECT_EQ(read_run_log(folder / "log").records.back(), example_record(3));
}

TEST(RunLog, NamesTheFileThatCannotBeOpened) {
  TemporaryFolder folder;
  const path absent = folder / "absent/log";
  expect_contains(error_of<Error>([&] { RunLog::create(absent, {}); }), absent.string());
  expect_contains(error_of<Error>([&] { RunLog::resume(absent, 1); }), absent.string());
  expect_contains(error_of<Error>([&] { (void)read_run_log(absent); }), absent.string());
}

// The error for a log whose line `number` (from 1) is `bad`.
std::string error_of_line(size_t number, const std::string& bad) {
  TemporaryFolder folder;
  static const std::string full = [] {
    TemporaryFolder example;
    return write_example(example / "log");
  }();
  std::string changed;
  size_t begin = 0;
  for (size_t line = 1; begin < full.size(); ++line) {
    const size_t end = full.find('\n', begin) + 1;
    changed += line == number ? bad + '\n' : full.substr(begin, end - begin);
    begin = end;
  }
  write_content(folder / "log", changed);
  const std::string error = error_of<CorruptFile>([&] { (void)read_run_log(folder / "log"); });
  EXPECT_EQ(error, error_of<CorruptFile>([&] { RunLog::resume(folder / "log", 100); }));
  EXPECT_EQ(content_of(folder / "log"), changed) << "resume changed a log it cannot read";
  expect_contains(error, (folder / "log").string());
  return error;
}

TEST(ReadRunLog, NamesTheLineThatIsBroken) {
  for (const char* bad : {"", "garbage", "null", "17", "[]", "{", "{\"step\":3", "{}", "{\"step\":3}",
                          "{\"event\":7,\"step\":1}", "{\"event\":\"x\"}", "{\"event\":\"x\",\"step\":1.5}",
                          "{\"event\":\"x\",\"step\":1,\"more\":[1]}", "{\"event\":\"x\",\"step\":1,\"more\":null}"}) {
    expect_contains(error_of_line(4, bad), ", line 4: ");
  }
  expect_contains(error_of_line(4, std::string(50'000, '[')), ", line 4: ");
  expect_contains(error_of_line(4, std::string("\0\0\0", 3)), ", line 4: ");
  expect_contains(error_of_line(8, "torn but with a line end"), ", line 8: ");
}

TEST(ReadRunLog, NamesTheFieldThatIsOfAnotherType) {
  TemporaryFolder folder;
  {
    RunLog::create(folder / "log", {}).write(example_record(2));
  }
  const std::string full = content_of(folder / "log");
  const std::string good = full.substr(full.find('\n') + 1, full.size() - full.find('\n') - 2);
  const auto expect = [&](const char* from, const char* to, const char* message) {
    std::string bad = good;
    const size_t at = bad.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    expect_contains(error_of_line(2, bad.replace(at, std::string_view(from).size(), to)), message);
  };
  expect("\"items\":8192", "\"items\":81.92", "\"items\" is not a 64-bit integer");
  expect("\"items\":8192", "\"items\":9223372036854775808", "\"items\" is not a 64-bit integer");
  expect("\"items\":8192", "\"items\":99999999999999999999999", "\"items\" is not a 64-bit");
  expect("\"items\":8192,", "", "\"items\" is missing");
  expect("\"stepped\":true", "\"stepped\":1", "\"stepped\" is neither true nor false");
  expect("\"loss\":1.0", "\"loss\":\"one\"", "\"loss\" is not a number");
  expect("\"loss\":1.0", "\"loss\":null", "\"loss\" is not a number");
  expect("\"loss\":1.0", "\"loss\":1e999", "not a JSON object");
  expect("\"gradients\":2,", "", "\"gradients\" is missing");
  expect("\"memory\":{", "\"memory\":7,\"other\":{", "\"memory\" is not an object");
  expect("\"validation_loss\":0.3333333333333333", "\"validation_loss\":{}", "\"validation_loss\"");
}

TEST(ReadRunLog, ReadsIntegersWhereDoublesAreMeantAndIgnoresFieldsItDoesNotKnow) {
  TemporaryFolder folder;
  {
    RunLog::create(folder / "log", {}).write({.step = 1, .loss = 2.0});
  }
  std::string content = content_of(folder / "log");
  content.replace(content.find("\"loss\":2.0"), 10, "\"loss\":2,\"new\":[1]");
  write_content(folder / "log", content);
  EXPECT_EQ(read_run_log(folder / "log").records.at(0).loss, 2.0);
}

TEST(ReadRunLog, InsistsOnASettingsLineItUnderstands) {
  expect_contains(error_of_line(1, "{\"step\":1}"), ", line 1: \"snug_run\" is missing");
  expect_contains(error_of_line(1, "{\"snug_run\":2,\"settings\":{}}"), "version is 2");
  expect_contains(error_of_line(1, "{\"snug_run\":1}"), "\"settings\" is missing");
  expect_contains(error_of_line(1, "{\"snug_run\":1,\"settings\":{\"a\":{}}}"), "\"a\" is neither");
  TemporaryFolder folder;
  for (const char* content : {"", "{\"snug_run\":1,\"settings\":{}}"}) {
    write_content(folder / "log", content);
    expect_contains(error_of<CorruptFile>([&] { (void)read_run_log(folder / "log"); }), "line 1");
  }
}

TEST(NewestEvent, IsTheLastOfItsNameUpToAStep) {
  const RunHistory log{.events = {{.name = "plan", .step = 1, .details = {{"micro_batch", int64_t{4}}}},
                                  {.name = "plan", .step = 3},
                                  {.name = "machine", .step = 3},
                                  {.name = "plan", .step = 3, .details = {{"micro_batch", int64_t{2}}}}}};
  EXPECT_EQ(newest_event(log, "plan", 3), &log.events[3]);
  EXPECT_EQ(newest_event(log, "plan", 2), log.events.data());
  EXPECT_EQ(newest_event(log, "plan", 0), nullptr);
  EXPECT_EQ(newest_event(log, "spike", 3), nullptr);
  EXPECT_EQ(*find_value(log.events[3].details, "micro_batch"), LogValue(int64_t{2}));
  EXPECT_EQ(find_value(log.events[3].details, "micro"), nullptr);
}

TEST(TextOf, ShowsEachKindOfValue) {
  EXPECT_EQ(text_of("a b"), "a b");
  EXPECT_EQ(text_of(int64_t{-3}), "-3");
  EXPECT_EQ(text_of(0.1), "0.1");
  EXPECT_EQ(text_of(true), "true");
}

TEST(MemoryByCategory, AddsUpAllCategories) { EXPECT_EQ(example_record(1).memory.total(), 21); }

}  // namespace
}  // namespace snug::run_log_test
