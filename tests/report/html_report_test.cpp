#include "program/report/html_report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <set>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "src/core/file_system.h"
#include "tests/support/temporary_folder.h"

namespace snug::html_report_test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kMax = std::numeric_limits<double>::max();
constexpr int64_t kMost = std::numeric_limits<int64_t>::max();

StepRecord example_record(int64_t step) {
  const auto t = static_cast<double>(step);
  return {.step = step,
          .loss = 1.5 + 3 / t,
          .validation_loss = step % 10 == 0 ? std::optional(1.6 + 3 / t) : std::nullopt,
          .learning_rate = 3e-4,
          .grad_norm = 0.5 + 1 / t,
          .loss_scale = step < 20 ? 65536.0 : 32768.0,
          .stepped = step != 20,
          .items = 1000,
          .peak_bytes = 21 << 20,
          .activation_peak_bytes = 9 << 20,
          .memory = {.parameters = 1 << 20,
                     .gradients = 2 << 20,
                     .optimizer_state = 3 << 20,
                     .activations = 4 << 20,
                     .workspace = 5 << 20,
                     .other = 6 << 20},
          .seconds = 0.5,
          .items_per_second = 2000 + t};
}

RunHistory example_history(int64_t steps) {
  RunHistory history;
  history.settings = {{"model", "gpt"}, {"lr", 3e-4}, {"batch", int64_t{64}}, {"offload", false}};
  for (int64_t step = 1; step <= steps; ++step) {
    history.records.push_back(example_record(step));
  }
  return history;
}

// Runs that a page must bear, from nothing to nonsense.
std::vector<RunHistory> strange_histories() {
  std::vector<RunHistory> all{{}, example_history(1), example_history(2), example_history(500)};
  RunHistory nonsense;
  nonsense.records.push_back({.step = -kMost,
                              .loss = kMax,
                              .validation_loss = -kMax,
                              .learning_rate = 5e-324,
                              .grad_norm = -kMax,
                              .loss_scale = -1,
                              .items = kMost,
                              .peak_bytes = kMost,
                              .activation_peak_bytes = kMost,
                              .memory = {kMost, kMost, kMost, kMost, kMost, kMost},
                              .seconds = kMax,
                              .items_per_second = kMax});
  nonsense.records.push_back(nonsense.records.front());
  nonsense.records.push_back({.step = kMost,
                              .loss = -kMax,
                              .validation_loss = kNan,
                              .learning_rate = kInf,
                              .grad_norm = -kInf,
                              .loss_scale = 0,
                              .stepped = false,
                              .items = -kMost,
                              .peak_bytes = -kMost,
                              .memory = {-1, -kMost, 0, 1, -kMost, -kMost},
                              .seconds = -kInf,
                              .items_per_second = kNan});
  all.push_back(nonsense);
  RunHistory broken = example_history(200);
  for (StepRecord& record : broken.records) {
    record = {.step = record.step,
              .loss = kNan,
              .validation_loss = kInf,
              .learning_rate = kNan,
              .grad_norm = kInf,
              .loss_scale = kNan,
              .seconds = kNan,
              .items_per_second = -kInf};
  }
  all.push_back(broken);
  return all;
}

size_t count(std::string_view text, std::string_view part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) {
    ++found;
  }
  return found;
}

void expect_contains(const std::string& page, std::string_view part) {
  EXPECT_GT(count(page, part), 0u) << "the page lacks: " << part;
}

// The first tag that is closed in the wrong order or never; empty if there is none.
std::string misnested_tag(std::string_view page) {
  const std::set<std::string_view> without_end{"!DOCTYPE", "meta", "link"};
  std::vector<std::string_view> open;
  for (size_t at = page.find('<'); at != std::string_view::npos; at = page.find('<', at + 1)) {
    const size_t end = page.find('>', at);
    std::string_view tag = page.substr(at + 1, end - at - 1);
    const bool closes = tag.starts_with('/');
    const bool closed_at_once = tag.ends_with('/');
    tag.remove_prefix(closes ? 1 : 0);
    const std::string_view name = tag.substr(0, tag.find_first_of(" \n/"));
    if (closes) {
      if (open.empty() || open.back() != name) {
        return "/" + std::string(name);
      }
      open.pop_back();
    } else if (!closed_at_once && !without_end.contains(name)) {
      open.push_back(name);
    }
    at = name == "style" || name == "script" ? page.find("</", end) - 1 : end;
  }
  return open.empty() ? "" : std::string(open.back());
}

// The content of every attribute of this name.
std::vector<std::string_view> attributes(std::string_view page, std::string_view name) {
  std::vector<std::string_view> contents;
  const std::string opening = " " + std::string(name) + "=\"";
  for (size_t at = page.find(opening); at != std::string_view::npos; at = page.find(opening, at)) {
    at += opening.size();
    contents.push_back(page.substr(at, page.find('"', at) - at));
  }
  return contents;
}

TEST(HtmlReport, ShowsFiguresChartsSampleAndSettings) {
  const std::string page = html_report(example_history(100), {.title = "My run", .sample = "Enter HAMLET."});
  for (const char* part : {"<title>My run</title>",
                           "<h1>My run</h1>",
                           "100 steps · 100 k tokens · 50 s",
                           "Final training loss",
                           ">1.53<",
                           "Best validation loss",
                           ">1.63<",
                           "at step 100",
                           "Tokens per second",
                           ">2,051<",
                           "Peak memory",
                           ">21.00<",
                           "activation peak 9.00 MiB",
                           ">Loss<",
                           ">Learning rate<",
                           ">Gradient norm<",
                           ">Throughput<",
                           ">Loss scale<",
                           "skipped step (1)",
                           ">Memory by category<",
                           ">Memory at the peak<",
                           "optimizer state",
                           ">3.00 MiB<",
                           "14.3 %",
                           "Enter HAMLET.",
                           "<dt>model</dt><dd>gpt</dd>",
                           "<dt>lr</dt><dd>0.0003</dd>",
                           "<dt>batch</dt><dd>64</dd>",
                           "<dt>offload</dt><dd>no</dd>"}) {
    expect_contains(page, part);
  }
}

TEST(HtmlReport, CountsInTheItemOfTheRun) {
  const std::string page = html_report(example_history(3), {.item = "images"});
  expect_contains(page, "Images per second");
  expect_contains(page, "3.00 k images");
  EXPECT_EQ(count(page, "okens"), 0u);
}

TEST(HtmlReport, LoadsNothingFromAnywhere) {
  const std::string page = html_report(example_history(300));
  for (const char* part : {"http:", "https:", "//", "url(", "@import", " src=", "<img", "<iframe", "fetch("}) {
    EXPECT_EQ(count(page, part), 0u) << part;
  }
  EXPECT_EQ(attributes(page, "href"), std::vector<std::string_view>{"data:,"});
  expect_contains(page, "default-src 'none'");
}

TEST(HtmlReport, EscapesTextFromEverySource) {
  const std::string evil = "</pre></style><script>alert('x')</script>\" onload=\"y\" &amp;";
  RunHistory history = example_history(90);
  history.settings.emplace_back(evil, evil);
  history.events.push_back({.name = evil, .step = 1, .details = {{evil, evil}}});
  const std::string page = html_report(history, {.title = evil, .sample = evil, .item = evil});
  EXPECT_EQ(count(page, "<script>"), 1u);
  EXPECT_EQ(count(page, "alert('x')"), 0u);
  EXPECT_EQ(count(page, " onload=\""), 0u);
  EXPECT_EQ(misnested_tag(page), "");
  expect_contains(page, "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&quot; onload=&quot;y&quot; &amp;amp;");
}

TEST(HtmlReport, IsUtf8WhateverTheModelWrites) {
  std::string sample;
  for (int byte = 0; byte < 256; ++byte) {
    sample += static_cast<char>(byte);
    sample += "\xe6\xbc";
  }
  const std::string page = html_report(example_history(2), {.title = "\xff", .sample = sample});
  EXPECT_NO_THROW((void)nlohmann::json(page).dump());  // strict about UTF-8
  EXPECT_EQ(page.find('\0'), std::string::npos);
  EXPECT_EQ(count(html_report(example_history(2), {.sample = "ROMÉO"}), "ROMÉO"), 1u);
}

TEST(HtmlReport, KeepsALineFeedAtTheStartOfTheSample) {
  expect_contains(html_report({}, {.sample = "\nROMEO:"}), "\">\n\nROMEO:</pre>");
}

TEST(HtmlReport, IsWellNestedAndDrawsOnlyWithinThePlotForEveryRun) {
  for (const RunHistory& history : strange_histories()) {
    const std::string page = html_report(history);
    EXPECT_EQ(misnested_tag(page), "");
    for (const std::string_view path : attributes(page, "d")) {
      ASSERT_EQ(path.find_first_not_of("MLHZhvz-0123456789. "), std::string_view::npos) << path;
      for (size_t at = path.find_first_of("ML"); at != std::string_view::npos; at = path.find_first_of("ML", at + 1)) {
        char* after_x = nullptr;
        const double x = std::strtod(path.data() + at + 1, &after_x);
        const double y = std::strtod(after_x, nullptr);
        ASSERT_TRUE(x >= 0 && x <= 1000 && y >= 0 && y <= 1000) << path;
      }
    }
    for (const std::string_view data : attributes(page, "data-hover")) {
      std::string json(data);
      for (size_t at = json.find("&quot;"); at != std::string::npos; at = json.find("&quot;")) {
        json.replace(at, 6, "\"");
      }
      const auto hover = nlohmann::json::parse(json);
      EXPECT_EQ(hover.at("places").size(), hover.at("texts").size());
    }
  }
}

TEST(HtmlReport, SaysSoWhenThereAreNoRecords) {
  const std::string page = html_report({});
  expect_contains(page, "No steps were logged.");
  expect_contains(page, "no steps yet");
  EXPECT_EQ(count(page, "<figure"), 0u);
}

TEST(HtmlReport, ShowsTheValuesOfASingleRecord) {
  const std::string page = html_report(example_history(1));
  expect_contains(page, "1 step · 1.00 k tokens · 0.5 s");
  expect_contains(page, "<path class=\"dots training\" d=\"M500.0 ");
  expect_contains(page, "not measured");
}

TEST(HtmlReport, PointsOutLossesThatAreNotFinite) {
  RunHistory history = example_history(200);
  for (size_t i = 50; i < 58; ++i) {
    history.records[i].loss = kNan;
  }
  history.records.back().loss = kNan;
  const std::string page = html_report(history);
  expect_contains(page, "NaN or infinite (9)");
  expect_contains(page, ">NaN<");
  // Neither the single steps nor their mean are drawn across the gap.
  for (const std::string_view opening :
       {"<path class=\"line training faint\" d=\"", "<path class=\"line training\" d=\""}) {
    const size_t begin = page.find(opening) + opening.size();
    EXPECT_EQ(count(page.substr(begin, page.find('"', begin) - begin), "M"), 2u) << opening;
  }
}

TEST(HtmlReport, DrawsALogarithmicAxisOnlyWhereAFewValuesWouldHideTheRest) {
  RunHistory history = example_history(50);
  EXPECT_EQ(count(html_report(history), "10⁵"), 0u);
  history.records[30].grad_norm = 4e5;
  expect_contains(html_report(history), "10⁵");
}

TEST(HtmlReport, StaysSmallAndKeepsASpikeInALongRun) {
  RunHistory history = example_history(100'000);
  history.records[70'000].grad_norm = 9.25;
  const std::string page = html_report(history);
  EXPECT_LT(page.size(), 500'000u);
  EXPECT_GT(count(page, " 75.0L"), 0u);  // 9.25 of 10, from above
}

TEST(HtmlReport, DoesNotDependOnTheOrderOfTheRecords) {
  RunHistory history = example_history(300);
  const std::string page = html_report(history);
  std::reverse(history.records.begin(), history.records.end());
  EXPECT_EQ(html_report(history), page);
}

TEST(HtmlReport, UsesTheColourBlindPaletteInLightAndDark) {
  const std::string page = html_report(example_history(3));
  for (const char* part : {"#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "prefers-color-scheme: dark",
                           "stroke-dasharray: 7 5", "class=\"line validation\""}) {
    expect_contains(page, part);
  }
}

TEST(HtmlReport, ListsEvents) {
  RunHistory history = example_history(3);
  history.events.push_back({.name = "snapshot", .step = 2, .details = {{"file", "step-2"}, {"bytes", int64_t{1234}}}});
  expect_contains(html_report(history), "<td>step 2</td><td>snapshot</td><td>file: step-2, bytes: 1,234</td>");
}

TEST(HtmlReport, MakesAPageFromALogOnTheDisk) {
  const testing::TemporaryFolder folder;
  const std::string text = "Enter GHOST.";
  snug::RunLog log = snug::RunLog::create(folder / "log.jsonl", {{"model", "gpt"}, {"lr", 3e-4}});
  log.write({.step = 1, .loss = 4.2, .learning_rate = 3e-4, .stepped = true, .items = 8192});
  // The example in html_report.h.
  snug::RunHistory history = snug::read_run_log(folder / "log.jsonl");
  std::string page = snug::html_report(history, {.title = "GPT on Shakespeare", .sample = text});
  snug::detail::FileSystem::real().write_file(folder / "report.html", std::array<std::string_view, 1>{page});
  expect_contains(detail::FileSystem::real().read_file(folder / "report.html"), ">4.2<");
}

TEST(HtmlReport, SaysWhatWasSentIfAnythingWas) {
  RunHistory history = example_history(2);
  EXPECT_EQ(html_report(history, {}).find("Gradients sent"), std::string::npos);
  history.records[1].communication = {.bytes_sent = 3 << 20, .seconds = 2.0, .waited = 0.5};
  const std::string page = html_report(history, {});
  EXPECT_NE(page.find("Gradients sent"), std::string::npos);
  EXPECT_NE(page.find("75 % of the time hidden behind backward"), std::string::npos);
}

}  // namespace
}  // namespace snug::html_report_test
