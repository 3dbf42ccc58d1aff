#pragma once
// RematPlan: what stays, what is rebuilt and what is offloaded in one training step, with what that costs; and its
// explanation.

#include <cstdint>
#include <string>
#include <string_view>

#include "snug/planner/simulator.h"

namespace snug {

struct RematPlan {
  plan::Stays stays = {};
  int64_t peak_bytes = 0;  ///< predicted, above the level before the step
  double seconds = 0;      ///< predicted: plain_seconds, all replays and transfers
  int64_t plain_peak_bytes = 0;
  double plain_seconds = 0;
  double bound_seconds = 0;  ///< no plan within the budget is faster than this

  /// How far it can be from the fastest plan, as a share of that plan's time at most: 0.01 is one per cent.
  double gap() const { return bound_seconds > 0 ? seconds / bound_seconds - 1 : 0; }

  /// Seconds read back bit for bit.
  std::string to_json() const;

  /// Throws ConfigError for what is not a plan, or is one of another format version.
  static RematPlan from_json(std::string_view text);

  friend bool operator==(const RematPlan&, const RematPlan&) = default;
};

/// For people: peak and time against plain training and the bound, what is rebuilt or goes to disk and what that costs
/// by operator, and who is alive at the peak; at most `rows` lines of each. Throws ConfigError if plan and profile do
/// not belong together.
std::string explain(const plan::StepSimulator& simulator, const RematPlan& plan, int rows = 8);

}  // namespace snug
