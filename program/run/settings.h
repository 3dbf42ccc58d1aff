#pragma once
// The settings of a run in one table, for the first line of the run's log and for the command line of `snug train`.

#include <cstdint>
#include <optional>
#include <span>

#include "program/report/run_log.h"
#include "program/run/config.h"

namespace snug {

/// A setting of a run: the name in the log, the flag, and functions that read and write the setting.
struct Setting {
  const char* name;   ///< in the log, such as "micro_batch"
  const char* flag;   ///< such as "--micro-batch"
  const char* value;  ///< the name of the value in `--help`; empty: a switch
  const char* help;
  /// The given value, or the default.
  LogValue (*get)(const TrainConfig& config);
  /// `value` has the same type as the result of get(). Throws ConfigError, or Error for a name or number of bytes, if
  /// the value is not possible.
  void (*set)(TrainConfig& config, const LogValue& value);
  std::optional<int64_t> least = {};  ///< the least value of a whole number
  bool is_later = false;              ///< logs of earlier versions lack the setting
  /// For data, and for a model in a file, only the path may change: a run identifies data and model by checksums.
  bool may_change_on_resume = false;
};

/// All settings but `out`, in the order of the log and of TrainConfig::to_settings.
std::span<const Setting> settings();

}  // namespace snug
