#pragma once
// RunLog: a record of a training run, one JSON line per step, readable after a kill at any moment.
//
//   snug::RunLog log = snug::RunLog::create(folder / "log.jsonl", {{"model", "gpt"}, {"lr", 3e-4}});
//   log.write({.step = 1, .loss = 4.2, .learning_rate = 3e-4, .stepped = true, .items = 8192});
//   snug::RunHistory history = snug::read_run_log(folder / "log.jsonl");
//
// The first line holds the settings. Doubles read back bit for bit; NaN and infinities are strings.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "src/core/file_system.h"

namespace snug {

/// Bytes held at one moment, by category.
struct MemoryByCategory {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer_state = 0;
  int64_t activations = 0;  ///< saved for the backward pass
  int64_t workspace = 0;    ///< allocated in the step, outside the other categories
  int64_t other = 0;        ///< memory from before: data, buffers, the rest of the program

  /// The sum of all categories.
  int64_t total() const;
  friend bool operator==(const MemoryByCategory&, const MemoryByCategory&) = default;
};

/// The communication of a rank of a data-parallel run in a step.
struct Communication {
  int64_t bytes_sent = 0;  ///< of gradients
  double seconds = 0;      ///< time with gradients on the way
  double waited = 0;       ///< the part of `seconds` without other work to do; the rest was hidden behind backward

  friend bool operator==(const Communication&, const Communication&) = default;
};

/// One optimizer step, as in the log and in charts.
struct StepRecord {
  int64_t step = 0;                            ///< counted from 1; skipped steps count, too
  double loss = 0;                             ///< mean over the items of the step
  std::optional<double> validation_loss = {};  ///< if measured after this step
  double learning_rate = 0;
  double grad_norm = 0;                             ///< before clipping
  std::optional<double> gradient_noise_scale = {};  ///< size up to which a larger batch pays, if measured
  double loss_scale = 1;
  bool stepped = true;  ///< false: the scaler skipped the step for Inf or NaN in the gradients
  int64_t items = 0;
  int64_t micro_batches = 1;
  int64_t peak_bytes = 0;             ///< the highest live tensor memory in this step
  int64_t activation_peak_bytes = 0;  ///< the rise above the level before the step, less the bytes of all gradients
  MemoryByCategory memory = {};       ///< the memory at the peak, by category
  std::optional<Communication> communication = {};  ///< of rank 0, if the run has other ranks
  double seconds = 0;                               ///< duration of the step
  double items_per_second = 0;

  friend bool operator==(const StepRecord&, const StepRecord&) = default;
};

/// Named values in the given order. Writing values with a repeated name is a ConfigError.
using LogValue = std::variant<std::string, int64_t, double, bool>;
using LogValues = std::vector<std::pair<std::string, LogValue>>;

/// Strings unchanged, numbers in the shortest form that reads back, true or false.
std::string text_of(const LogValue& value);

/// The value with the name `name`; null if no value has the name.
const LogValue* find_value(const LogValues& values, std::string_view name);

/// Something that is not a step: "snapshot", "resumed", "interrupted".
struct RunEvent {
  std::string name;
  int64_t step = 0;        ///< the last step done before the event
  LogValues details = {};  ///< names other than "event" and "step"

  friend bool operator==(const RunEvent&, const RunEvent&) = default;
};

class RunLog {
 public:
  /// Starts a log: the file exists with the settings and the first events, or does not exist. Throws ConfigError if the
  /// file exists already, Error if the file cannot be written.
  static RunLog create(const std::filesystem::path& path, const LogValues& settings,
                       const std::vector<RunEvent>& events = {},
                       detail::FileSystem& files = detail::FileSystem::real());

  /// Continues a log after a restart from the snapshot of `last_step`. Cuts the file back, in one atomic replacement,
  /// to the settings and to the records and events up to `last_step`, then appends. A last line torn by a kill is
  /// dropped. The values in `changed` replace the settings with the same names. Throws CorruptFile for any other broken
  /// line, Error if the file cannot be read or written; the file is then unchanged or cut back, never in between.
  static RunLog resume(const std::filesystem::path& path, int64_t last_step,
                       detail::FileSystem& files = detail::FileSystem::real(), const LogValues& changed = {});

  RunLog(RunLog&& other) noexcept;
  RunLog& operator=(RunLog&& other) noexcept;
  ~RunLog();

  /// Appends one line with one write, handed to the operating system when write() returns: a kill loses nothing. Throws
  /// Error (disk full ...); the written part of the line is then removed again.
  void write(const StepRecord& record);

  /// Appends an event in the same way. Throws ConfigError if a detail is named "event" or "step".
  void event(const RunEvent& event);

  /// Returns when all lines are on the disk (fsync): for a snapshot that must not outlive the snapshot's log.
  void sync();

 private:
  explicit RunLog(std::filesystem::path path);
  void append(const std::string& line);

  std::filesystem::path path_;
  int file_ = -1;
};

/// A run log in memory.
struct RunHistory {
  LogValues settings;
  std::vector<StepRecord> records;
  std::vector<RunEvent> events;
};

/// The last event with the name `name`, up to `last_step`; null if no such event exists.
const RunEvent* newest_event(const RunHistory& log, std::string_view name, int64_t last_step);

/// Reads the log of a finished or running run. A last line without a line end (torn by a kill, or being written) is
/// left out. Throws CorruptFile with the line's number for any other line that RunLog cannot have written; Error if the
/// file cannot be read.
RunHistory read_run_log(const std::filesystem::path& path,
                        const detail::FileSystem& files = detail::FileSystem::real());

}  // namespace snug
