#include "cli/progress.h"

#include <algorithm>
#include <cstdio>

#include <fmt/format.h>
#include <unistd.h>

#include "cli/printable.h"
#include "snug/core/bytes.h"

namespace snug::cli {
namespace {

constexpr int kBarWidth = 20;
constexpr int64_t kPlainLines = 50;  // in a whole run

std::string duration(double seconds) {
  const auto s = static_cast<int64_t>(seconds + 0.5);
  return s < 3600 ? fmt::format("{}:{:02}", s / 60, s % 60)
                  : fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

}  // namespace

Progress::Progress(int64_t total_steps) : total_(total_steps), is_terminal_(isatty(STDOUT_FILENO) == 1) {}

Progress::~Progress() {
  if (bar_is_shown_) {
    fmt::print("\n");
  }
}

std::string Progress::time_left(int64_t step) const {
  const int64_t done = step - first_step_;
  if (done == 0) {
    return "?";
  }
  const double passed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  return duration(passed / static_cast<double>(done) * static_cast<double>(total_ - step));
}

std::string Progress::bar(const StepRecord& record) const {
  std::string text = fmt::format("step {}/{}  loss {:.4f}", record.step, total_, record.loss);
  if (has_validation_) {
    text += fmt::format("  held-out {:.4f}", validation_loss_);
  }
  return text + fmt::format("  {:.0f} tokens/s  {} left  peak {}{}", record.items_per_second, time_left(record.step),
                            Bytes(record.peak_bytes).str(), record.stepped ? "" : "  (skipped)");
}

void Progress::step(const StepRecord& record) {
  if (first_step_ < 0) {
    first_step_ = record.step;
    start_ = std::chrono::steady_clock::now();
  }
  if (record.validation_loss) {
    has_validation_ = true;
    validation_loss_ = *record.validation_loss;
  }
  if (is_terminal_) {
    const auto filled = static_cast<int>(kBarWidth * record.step / std::max<int64_t>(1, total_));
    fmt::print("\r\x1b[K[{:=<{}}{: <{}}] {}", "", filled, "", kBarWidth - filled, bar(record));
    bar_is_shown_ = true;
  } else if (record.step == first_step_ || record.step == total_ ||
             record.step % std::max<int64_t>(1, total_ / kPlainLines) == 0) {
    fmt::print("{}\n", bar(record));
  }
  std::fflush(stdout);
}

void Progress::note(const std::string& text) {
  fmt::print("{}{}\n", bar_is_shown_ ? "\r\x1b[K" : "", printable(text));
  bar_is_shown_ = false;
  std::fflush(stdout);
}

}  // namespace snug::cli
