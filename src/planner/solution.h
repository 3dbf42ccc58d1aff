#pragma once
// Solution: the storages that stay, are rebuilt or are offloaded in a training step, with the cost in bytes and
// seconds. explain() describes the plan to people.

#include <cstdint>
#include <string>
#include <string_view>

#include "src/planner/stay.h"

namespace snug::plan {

class Simulator;
struct AtPeak;

/// The fate of each storage in a training step, and the predicted cost.
struct Solution {
  Stays stays = {};
  int64_t peak_bytes = 0;  ///< predicted, above the level before the step
  double seconds = 0;      ///< predicted: plain_seconds, all replays and transfers
  int64_t plain_peak_bytes = 0;
  double plain_seconds = 0;
  double bound_seconds = 0;  ///< no plan within the budget is faster

  /// How much slower than the fastest plan the plan can be at most, as a share of the fastest plan's time: 0.01 is one
  /// per cent.
  double gap() const { return bound_seconds > 0 ? seconds / bound_seconds - 1 : 0; }

  /// The plan as JSON, from which seconds are read back bit for bit.
  std::string to_json() const;

  /// Reads a plan. Throws ConfigError if `text` is not a plan, or is a plan of another format version.
  static Solution from_json(std::string_view text);

  friend bool operator==(const Solution&, const Solution&) = default;
};

/// A text for people, with at most `rows` lines of each:
///
/// - peak and time against plain training and the bound;
/// - the storages that are rebuilt, or go to disk or host memory, and the cost, by operator;
/// - what is alive at the peak, by kind, and the storages, by operator.
///
/// Throws ConfigError if plan and profile do not belong together.
std::string explain(const Simulator& simulator, const Solution& plan, int rows = 8);

/// What is alive at the peak, in a sentence: the largest three kinds of at least a hundredth, and what helps against
/// tensors that the program holds. `beside`: bytes in memory beside the peak: weights, optimizer state, the batch; 0:
/// the sentence is silent.
std::string sentence(const AtPeak& peak, int64_t beside = 0);

}  // namespace snug::plan
