#include "program/progress.h"

#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace snug::progress_test {

using cli::Progress;
using cli::Screen;

constexpr const char* kErase = "\r\x1b[K";

// What is shown on it, and a clock that a test sets.
struct Shown {
  int columns = 0;
  double seconds = 0;
  std::vector<std::string> texts = {};

  Screen screen() {
    return {.show = [this](std::string_view text) { texts.emplace_back(text); },
            .columns = [this] { return columns; },
            .seconds = [this] { return seconds; }};
  }
};

StepRecord step(int64_t number) {
  StepRecord record{.step = number, .loss = 5.4321, .peak_bytes = int64_t{123} << 20, .items_per_second = 12345};
  record.validation_loss = 5.1234;
  return record;
}

// The second of 1000 steps, ten seconds after the first.
std::string line(int columns, bool stepped = true) {
  Shown shown{.columns = columns};
  Progress progress(1000, "tokens", shown.screen());
  progress.step(step(1));
  shown.seconds = 10;
  StepRecord record = step(2);
  record.stepped = stepped;
  progress.step(record);
  const std::string text = shown.texts.back();
  EXPECT_TRUE(text.starts_with(kErase)) << text;
  return text.substr(std::string_view(kErase).size());
}

TEST(Progress, IsOneLineOnATerminalOfAnyWidth) {
  for (int columns = 1; columns < 200; ++columns) {
    EXPECT_LT(line(columns).size(), static_cast<size_t>(columns)) << line(columns);
    EXPECT_EQ(line(columns).find('\n'), std::string::npos);
  }
}

TEST(Progress, ShowsTheTimeLeftAndThePeakIn80Columns) {
  EXPECT_EQ(line(80), "step 2/1000  loss 5.4321  held-out 5.1234  2:46:20 left  peak 123.00 MiB");
}

TEST(Progress, LeavesOutWhatIsLessImportantWhereTheLineIsTooLong) {
  EXPECT_EQ(line(150),
            "[                    ] step 2/1000  loss 5.4321  held-out 5.1234  12345 tokens/s  2:46:20 left  peak "
            "123.00 MiB");
  EXPECT_EQ(line(70), "[           ] step 2/1000  loss 5.4321  2:46:20 left  peak 123.00 MiB");
  EXPECT_EQ(line(50), "[        ] step 2/1000  loss 5.4321  2:46:20 left");
  EXPECT_EQ(line(30), "step 2/1000  loss 5.4321");
  EXPECT_EQ(line(40, /*stepped=*/false), "step 2/1000  loss 5.4321  (skipped)");
  EXPECT_EQ(line(16), "step 2/1000");
  EXPECT_EQ(line(5), "step");
}

TEST(Progress, FollowsTheWidthOfATerminalThatChanges) {
  Shown shown{.columns = 200};
  Progress progress(1000, "tokens", shown.screen());
  progress.step(step(1));
  shown.columns = 40;
  progress.step(step(2));
  EXPECT_GT(shown.texts[0].size(), 80u);
  EXPECT_LT(shown.texts[1].size(), 40u + std::string_view(kErase).size());
}

TEST(Progress, NamesWhatIsCounted) {
  Shown shown;
  Progress(10, "items", shown.screen()).step(step(1));
  EXPECT_NE(shown.texts.front().find(" items/s "), std::string::npos) << shown.texts.front();
}

TEST(Progress, ElsewhereHasALineForEachFiftiethAndAfterTenSecondsOfSilence) {
  Shown shown;
  Progress progress(1000, "tokens", shown.screen());
  for (int64_t i = 1; i <= 100; ++i) {
    progress.step(step(i));
  }
  EXPECT_EQ(shown.texts.size(), 6u);  // the first, and every 20th
  for (int64_t i = 101; i <= 110; ++i) {
    shown.seconds += 9;
    progress.step(step(i));
  }
  EXPECT_EQ(shown.texts.size(), 11u);  // every other one
  progress.step(step(1000));
  EXPECT_EQ(shown.texts.size(), 12u);
  for (const std::string& text : shown.texts) {
    EXPECT_EQ(text.back(), '\n');
    EXPECT_EQ(text.find('\r'), std::string::npos);
  }
}

TEST(Progress, LeavesTheLineOfTheLastStep) {
  Shown shown{.columns = 80};
  Progress progress(2, "tokens", shown.screen());
  progress.step(step(1));
  progress.step(step(2));
  progress.note("done");
  ASSERT_EQ(shown.texts.size(), 3u);
  EXPECT_EQ(shown.texts[1].back(), '\n');
  EXPECT_EQ(shown.texts[2], "done\n");
}

TEST(Progress, PutsANoteInThePlaceOfTheLine) {
  Shown shown{.columns = 80};
  {
    Progress progress(10, "tokens", shown.screen());
    progress.note("before");
    progress.step(step(1));
    progress.note("be\nhind");
    progress.step(step(2));
  }
  ASSERT_EQ(shown.texts.size(), 5u);
  EXPECT_EQ(shown.texts[0], "before\n");
  EXPECT_EQ(shown.texts[2], fmt::format("{}be\\nhind\n", kErase));
  EXPECT_EQ(shown.texts[4], "\n");  // what comes next begins a line
}

}  // namespace snug::progress_test
