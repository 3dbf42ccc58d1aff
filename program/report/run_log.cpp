#include "program/report/run_log.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "program/report/appending.h"
#include "program/report/run_log_format.h"
#include "program/report/run_log_parse.h"
#include "snug/core.h"
#include "src/core/file_system.h"

namespace snug {
namespace {

using std::filesystem::path;

bool is_after(const detail::LogLine& line, int64_t step) {
  if (const auto* record = std::get_if<StepRecord>(&line.entry)) {
    return record->step > step;
  }
  const auto* event = std::get_if<RunEvent>(&line.entry);
  return event != nullptr && event->step > step;
}

// The line of the settings with the values of `changed`; the same line if the values are equal already.
std::string with_changes(const detail::LogLine& line, const LogValues& changed) {
  const auto& before = std::get<LogValues>(line.entry);
  LogValues settings = before;
  for (auto& [name, value] : settings) {
    const LogValue* now = find_value(changed, name);
    value = now == nullptr ? value : *now;
  }
  return settings == before ? std::string(line.text) : detail::settings_line(settings);
}

}  // namespace

std::string text_of(const LogValue& value) {
  return std::visit([](const auto& v) { return fmt::format("{}", v); }, value);
}

const LogValue* find_value(const LogValues& values, std::string_view name) {
  const auto found = std::find_if(values.begin(), values.end(), [&](const auto& one) { return one.first == name; });
  return found == values.end() ? nullptr : &found->second;
}

const RunEvent* newest_event(const RunHistory& log, std::string_view name, int64_t last_step) {
  const auto found = std::find_if(log.events.rbegin(), log.events.rend(),
                                  [&](const RunEvent& event) { return event.name == name && event.step <= last_step; });
  return found == log.events.rend() ? nullptr : &*found;
}

int64_t MemoryByCategory::total() const {
  return parameters + gradients + optimizer_state + activations + workspace + other;
}

RunLog RunLog::create(const path& file, const LogValues& settings, const std::vector<RunEvent>& events,
                      detail::FileSystem& files) {
  if (files.exists(file)) {
    throw ConfigError(
        fmt::format("RunLog.create: {} exists already; resume that run or choose another folder", file.string()));
  }
  std::string lines = detail::settings_line(settings) + '\n';
  for (const RunEvent& event : events) {
    lines += detail::event_line(event) + '\n';
  }
  detail::replace_file(file, lines, files);
  return RunLog(file);
}

RunLog RunLog::resume(const path& file, int64_t last_step, detail::FileSystem& files, const LogValues& changed) {
  const std::string content = files.read_file(file);
  std::string kept;
  for (const detail::LogLine& line : detail::parse_run_log(content, file.string())) {
    if (kept.empty()) {
      kept = with_changes(line, changed) + '\n';
    } else if (!is_after(line, last_step)) {
      kept.append(line.text).append(1, '\n');
    }
  }
  detail::replace_file(file, kept, files);
  return RunLog(file);
}

RunLog::RunLog(path file) : path_(std::move(file)) {
  file_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (file_ < 0) {
    throw detail::system_error("RunLog.open", path_, errno);
  }
}

RunLog::RunLog(RunLog&& other) noexcept : path_(std::move(other.path_)), file_(std::exchange(other.file_, -1)) {}

RunLog& RunLog::operator=(RunLog&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(file_, other.file_);
  return *this;
}

RunLog::~RunLog() {
  if (file_ >= 0) {
    ::close(file_);
  }
}

void RunLog::write(const StepRecord& record) { append(detail::record_line(record)); }

void RunLog::event(const RunEvent& event) { append(detail::event_line(event)); }

void RunLog::append(const std::string& line) { detail::append_whole(file_, line + '\n', "RunLog", path_); }

void RunLog::sync() {
  if (::fsync(file_) != 0) {
    throw detail::system_error("RunLog.sync", path_, errno);
  }
}

RunHistory read_run_log(const path& file, const detail::FileSystem& files) {
  const std::string content = files.read_file(file);
  RunHistory history;
  for (detail::LogLine& line : detail::parse_run_log(content, file.string())) {
    if (auto* record = std::get_if<StepRecord>(&line.entry)) {
      history.records.push_back(*record);
    } else if (auto* event = std::get_if<RunEvent>(&line.entry)) {
      history.events.push_back(std::move(*event));
    } else {
      history.settings = std::get<LogValues>(std::move(line.entry));
    }
  }
  return history;
}

}  // namespace snug
