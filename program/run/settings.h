#pragma once
// The settings of a run in one table, for the first line of its log and for the command line of `snug train`.

#include <cstdint>
#include <optional>
#include <span>

#include "program/report/run_log.h"
#include "program/run/config.h"

namespace snug {

/// A setting of a run: its name in the log, its flag, and how to read and write it.
struct Setting {
  const char* name;   ///< in the log, such as "micro_batch"
  const char* flag;   ///< such as "--micro-batch"
  const char* value;  ///< how `--help` names its value; empty: a switch
  const char* help;
  /// The given value, or the default for it.
  LogValue (*get)(const TrainConfig& config);
  /// `value`: of the type that get() has. Throws ConfigError, or Error for a name or number of bytes, if it cannot be.
  void (*set)(TrainConfig& config, const LogValue& value);
  std::optional<int64_t> least = {};  ///< of a whole number
  bool is_later = false;              ///< logs of earlier versions do not have it
  /// Of data, and of a model in a file, only the place: a run knows them by their sums.
  bool may_change_on_resume = false;
};

/// All of them but `out`, in the order of the log and of TrainConfig::to_settings.
std::span<const Setting> settings();

}  // namespace snug
