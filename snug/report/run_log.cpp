#include "snug/report/run_log.h"

#include <array>
#include <cerrno>
#include <system_error>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "snug/core/error.h"
#include "snug/report/detail/run_log_format.h"

namespace snug {
namespace {

using std::filesystem::path;

Error system_error(std::string_view what, const path& file, int reason) {
  return Error(fmt::format("RunLog.{}: {}: {}", what, file.string(),
                           std::error_code(reason, std::generic_category()).message()));
}

// The file has the old content or the new, whatever happens.
void replace_file(FileSystem& files, const path& file, std::string_view content) {
  const path temporary = RunLog::temporary_path(file);
  try {
    files.write_file(temporary, std::array{content});
    files.rename(temporary, file);
  } catch (const Error&) {
    try {
      files.remove_all(temporary);
    } catch (const Error&) {  // the first error says what is wrong
    }
    throw;
  }
  files.sync_directory(file.has_parent_path() ? file.parent_path() : path("."));
}

bool is_after(const detail::LogLine& line, int64_t step) {
  if (const auto* record = std::get_if<StepRecord>(&line.entry)) {
    return record->step > step;
  }
  const auto* event = std::get_if<RunEvent>(&line.entry);
  return event != nullptr && event->step > step;
}

}  // namespace

int64_t MemoryByCategory::total() const {
  return parameters + gradients + optimizer_state + activations + workspace + other;
}

path RunLog::temporary_path(const path& file) { return file.string() + ".tmp"; }

RunLog RunLog::create(const path& file, const LogValues& settings, FileSystem& files) {
  if (files.exists(file)) {
    throw ConfigError(
        fmt::format("RunLog.create: {} exists already; resume that run or choose another folder", file.string()));
  }
  replace_file(files, file, detail::settings_line(settings) + '\n');
  return RunLog(file);
}

RunLog RunLog::resume(const path& file, int64_t last_step, FileSystem& files) {
  const std::string content = files.read_file(file);
  std::string kept;
  for (const detail::LogLine& line : detail::parse_run_log(content, file.string())) {
    if (!is_after(line, last_step)) {
      kept.append(line.text).append(1, '\n');
    }
  }
  replace_file(files, file, kept);
  return RunLog(file);
}

RunLog::RunLog(path file) : path_(std::move(file)) {
  file_ = ::open(path_.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (file_ < 0) {
    throw system_error("open", path_, errno);
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

void RunLog::append(const std::string& line) {
  const std::string bytes = line + '\n';
  const off_t before = ::lseek(file_, 0, SEEK_END);
  ssize_t written = -1;
  do {
    written = ::write(file_, bytes.data(), bytes.size());
  } while (written < 0 && errno == EINTR);
  if (written == static_cast<ssize_t>(bytes.size())) {
    return;
  }
  const int reason = written < 0 ? errno : ENOSPC;
  // Else the next line would be glued to the torn one, and the log could not be read any more.
  const bool taken_back = written < 0 || ::ftruncate(file_, before) == 0;
  throw system_error(taken_back ? "write" : "write (and a torn line is left)", path_, reason);
}

void RunLog::sync() {
  if (::fsync(file_) != 0) {
    throw system_error("sync", path_, errno);
  }
}

RunHistory read_run_log(const path& file, const FileSystem& files) {
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
