#include "program/progress.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "program/output.h"
#include "program/printable.h"
#include "snug/core.h"

namespace snug::cli {
namespace {

constexpr int kUsualColumns = 80;
constexpr size_t kWidestBar = 20, kNarrowestBar = 5;
constexpr int64_t kPlainLines = 50;  // in a whole run, besides the lines of slow steps
constexpr double kSilence = 10;      // seconds without a line
constexpr const char* kEraseLine = "\r\x1b[K";

std::string duration(double seconds) {
  const auto s = static_cast<int64_t>(seconds + 0.5);
  return s < 3600 ? fmt::format("{}:{:02}", s / 60, s % 60)
                  : fmt::format("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60);
}

int terminal_columns() {
  if (isatty(STDOUT_FILENO) != 1) {
    return 0;
  }
  winsize size = {};
  const bool is_told = ::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return is_told ? size.ws_col : kUsualColumns;
}

// A part of the line, and the order of leaving parts out: 0 never, 1 last.
struct Part {
  std::string text;
  int goes;
};

size_t width_of(const std::vector<Part>& parts) {
  size_t width = 0;
  for (const Part& part : parts) {
    width += part.text.size() + (width > 0 ? 2 : 0);
  }
  return width;
}

std::string bar(int64_t step, int64_t total, size_t width) {
  const auto filled = width * static_cast<size_t>(step) / static_cast<size_t>(std::max<int64_t>(1, total));
  return "[" + std::string(filled, '=') + std::string(width - filled, ' ') + "] ";
}

}  // namespace

Screen standard_output() {
  return {
      .show = [](std::string_view text) { show(stdout, text); },
      .columns = terminal_columns,
      .seconds =
          [] { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }};
}

Progress::Progress(int64_t total_steps, std::string item, Screen screen)
    : total_(total_steps), item_(std::move(item)), screen_(std::move(screen)) {}

Progress::~Progress() {
  if (is_line_open_) {
    screen_.show("\n");
  }
}

std::string Progress::time_left(int64_t step) const {
  const int64_t done = step - first_step_;
  return done <= 0
             ? "?"
             : duration((screen_.seconds() - start_) / static_cast<double>(done) * static_cast<double>(total_ - step));
}

std::string Progress::line(const StepRecord& record, int columns) const {
  const auto room = columns > 0 ? static_cast<size_t>(columns - 1) : std::numeric_limits<size_t>::max();
  std::vector<Part> parts{{fmt::format("step {}/{}", record.step, total_), 0},
                          {fmt::format("loss {:.4f}", record.loss), 1},
                          {validation_loss_ ? fmt::format("held-out {:.4f}", *validation_loss_) : "", 4},
                          {fmt::format("{:.0f} {}/s", record.items_per_second, item_), 5},
                          {time_left(record.step) + " left", 2},
                          {"peak " + Bytes(record.peak_bytes).str(), 3},
                          {record.stepped ? "" : "(skipped)", 1}};
  std::erase_if(parts, [](const Part& part) { return part.text.empty(); });
  for (int goes = 5; goes > 0 && width_of(parts) > room; --goes) {
    std::erase_if(parts, [&](const Part& part) { return part.goes == goes; });
  }
  std::string text;
  for (const Part& part : parts) {
    text += (text.empty() ? "" : "  ") + part.text;
  }
  text = text.substr(0, room);
  const size_t left = std::min(room - text.size(), kWidestBar + 3);
  return columns > 0 && left >= kNarrowestBar + 3 ? bar(record.step, total_, left - 3) + text : text;
}

void Progress::step(const StepRecord& record) {
  const double now = screen_.seconds();
  if (first_step_ < 0) {
    first_step_ = record.step;
    start_ = now;
  }
  validation_loss_ = record.validation_loss ? record.validation_loss : validation_loss_;
  const int columns = screen_.columns();
  if (columns > 0) {
    is_line_open_ = record.step < total_;
    screen_.show(kEraseLine + line(record, columns) + (is_line_open_ ? "" : "\n"));
  } else if (record.step == first_step_ || record.step == total_ || now - shown_at_ >= kSilence ||
             record.step % std::max<int64_t>(1, total_ / kPlainLines) == 0) {
    screen_.show(line(record, 0) + "\n");
    shown_at_ = now;
  }
}

void Progress::note(const std::string& text) {
  screen_.show((is_line_open_ ? kEraseLine : "") + printable(text) + "\n");
  is_line_open_ = false;
}

}  // namespace snug::cli
