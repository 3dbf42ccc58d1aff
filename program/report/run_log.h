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

#include "snug/file_system.h"

namespace snug {

/// Bytes held at one moment, by category.
struct MemoryByCategory {
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer_state = 0;
  int64_t activations = 0;  ///< saved for the backward pass
  int64_t workspace = 0;    ///< allocated in the step and none of the others
  int64_t other = 0;        ///< what was there before: data, buffers, the rest of the program

  /// The sum of all categories.
  int64_t total() const;
  friend bool operator==(const MemoryByCategory&, const MemoryByCategory&) = default;
};

/// The communication of a rank of a data-parallel run in a step.
struct Communication {
  int64_t bytes_sent = 0;  ///< of gradients
  double seconds = 0;      ///< while they were on their way
  double waited = 0;       ///< of those seconds, when nothing else was left to do; the rest was hidden behind backward

  friend bool operator==(const Communication&, const Communication&) = default;
};

/// One optimizer step, as it is logged and drawn.
struct StepRecord {
  int64_t step = 0;                            ///< counted from 1; skipped steps count, too
  double loss = 0;                             ///< mean over the items of the step
  std::optional<double> validation_loss = {};  ///< where it was measured after this step
  double learning_rate = 0;
  double grad_norm = 0;                             ///< before clipping
  std::optional<double> gradient_noise_scale = {};  ///< size up to which a larger batch pays, where it is known
  double loss_scale = 1;
  bool stepped = true;  ///< false: the scaler skipped the step for Inf or NaN in the gradients
  int64_t items = 0;
  int64_t micro_batches = 1;
  int64_t peak_bytes = 0;             ///< the highest live tensor memory in this step
  int64_t activation_peak_bytes = 0;  ///< its rise above the level before the step, less the bytes of all gradients
  MemoryByCategory memory = {};       ///< who held the memory at the peak
  std::optional<Communication> communication = {};  ///< of rank 0, if there are others
  double seconds = 0;                               ///< duration of the step
  double items_per_second = 0;

  friend bool operator==(const StepRecord&, const StepRecord&) = default;
};

/// Named values in the order they are given. A name that is there twice is a ConfigError when they are written.
using LogValue = std::variant<std::string, int64_t, double, bool>;
using LogValues = std::vector<std::pair<std::string, LogValue>>;

/// Strings as they are, numbers in the shortest form that reads back, true or false.
std::string text_of(const LogValue& value);

/// The value of that name; null where there is none.
const LogValue* find_value(const LogValues& values, std::string_view name);

/// Something that is no step: "snapshot", "resumed", "interrupted".
struct RunEvent {
  std::string name;
  int64_t step = 0;        ///< the last step done when it happened
  LogValues details = {};  ///< names other than "event" and "step"

  friend bool operator==(const RunEvent&, const RunEvent&) = default;
};

class RunLog {
 public:
  /// Starts a log: its file exists with the settings and the first events in it, or not at all. Throws ConfigError if
  /// the file exists already, Error if it cannot be written.
  static RunLog create(const std::filesystem::path& path, const LogValues& settings,
                       const std::vector<RunEvent>& events = {}, FileSystem& files = FileSystem::real());

  /// Continues a log after a restart from the snapshot of `last_step`. Cuts the file back, in one atomic replacement,
  /// to the settings and to the records and events up to that step, then appends. A last line that was torn by a kill
  /// is dropped. The values in `changed` replace the settings with the same names. Throws CorruptFile for any other
  /// broken line, Error if the file cannot be read or written; the file is then unchanged or cut back, never in
  /// between.
  static RunLog resume(const std::filesystem::path& path, int64_t last_step, FileSystem& files = FileSystem::real(),
                       const LogValues& changed = {});

  RunLog(RunLog&& other) noexcept;
  RunLog& operator=(RunLog&& other) noexcept;
  ~RunLog();

  /// Appends one line with one write, handed to the operating system when it returns: a kill loses nothing. Throws
  /// Error (disk full ...); the part of the line that was written is then removed again.
  void write(const StepRecord& record);

  /// Appends an event in the same way. Throws ConfigError if a detail is named "event" or "step".
  void event(const RunEvent& event);

  /// Returns when all lines are on the disk (fsync): before a snapshot that must not outlive its log.
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

/// The last of the events with that name, of those up to `last_step`; null where there is none.
const RunEvent* newest_event(const RunHistory& log, std::string_view name, int64_t last_step);

/// Reads the log of a finished or running run. A last line without its line end (torn by a kill, or being written) is
/// left out. Throws CorruptFile with the line's number for any other line that RunLog cannot have written; Error if the
/// file cannot be read.
RunHistory read_run_log(const std::filesystem::path& path, const FileSystem& files = FileSystem::real());

}  // namespace snug
