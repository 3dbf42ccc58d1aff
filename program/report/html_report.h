#pragma once
// html_report: a training run as one page that anyone can open, send and keep. Charts are inline SVG, and nothing is
// loaded from elsewhere. The page has a light and a dark form, and is legible without colour vision.
//
//   snug::RunHistory history = snug::read_run_log(folder / "log.jsonl");
//   std::string page = snug::html_report(history, {.title = "GPT on Shakespeare", .sample = text});
//   snug::detail::FileSystem::real().write_file(folder / "report.html", std::array<std::string_view, 1>{page});

#include <string>

#include "program/report/run_log.h"

namespace snug {

struct ReportExtras {
  std::string title = "Training run";  ///< heading and window title
  std::string sample = {};      ///< text that the model wrote; empty: no section for a sample. May hold any bytes
  std::string item = "tokens";  ///< the noun for StepRecord::items, in the plural
};

/// The page, as UTF-8. Works for a run without records and for values that are not finite. All text is escaped. Bytes
/// that are not UTF-8 show as U+FFFD.
std::string html_report(const RunHistory& history, const ReportExtras& extras = {});

}  // namespace snug
