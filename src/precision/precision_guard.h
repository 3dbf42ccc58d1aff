#pragma once
// PrecisionGuard: if 16-bit training of a part of a model overflows or underflows, computes the part in FP32, and goes
// back to 16 bits later. The class is only the policy: evidence in, decisions out. Stepper gathers the evidence and
// acts; see SixteenBitOptions::guard.
//
//   PrecisionGuard guard({.patience = 20});
//   auto changes = guard.observe({{"attention", {.non_finite = true, .zeros = 0.01}}});
//   if (guard.is_full("attention")) ...

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "snug/precision_guard.h"

namespace snug::detail {

/// PrecisionScope names the regions. A region's name is the beginning of the names of the parameters used by the
/// region. "" is the whole step.
class PrecisionGuard {
 public:
  /// Observations of a region's gradients in a step.
  struct Evidence {
    bool non_finite = false;
    double zeros = 0;  ///< share of elements that are exactly 0
  };
  /// What the guard remembers of a region, for a snapshot.
  struct RegionState {
    bool is_full = false;
    int64_t streak = 0;      // steps in a row with trouble; in FP32: steps in FP32
    int64_t stay = 0;        // how many steps the region stays in FP32
    int64_t since_back = 0;  // steps since the region came back from FP32; 0: the region never was in FP32
    double zeros_in_full = 0;
  };

  /// Throws ConfigError, naming the option, if an option is out of range.
  explicit PrecisionGuard(PrecisionGuardOptions options = {});

  /// Whether any evidence can move a region.
  bool is_on() const { return patience() > 0; }

  /// Takes one step's evidence: the whole step ("") first, then the regions in the order in which forward entered the
  /// regions. Gradients flow backward. So if several regions have non-finite gradients, the non-finite gradients arose
  /// in the region that was entered last and is not in FP32 yet, and only that region is blamed. Returns a line for
  /// each region that moves.
  std::vector<std::string> observe(const std::vector<std::pair<std::string, Evidence>>& step);

  /// Whether the region is in FP32 now, and the names of all regions in FP32.
  bool is_full(const std::string& region) const;
  std::set<std::string> full_regions() const;

  /// The state of all regions, and restoring the state: a guard with a restored state goes on from the state.
  const std::map<std::string, RegionState>& regions() const { return regions_; }
  void restore(std::map<std::string, RegionState> regions) { regions_ = std::move(regions); }

 private:
  std::string observe_low(const std::string& name, RegionState& region, const Evidence& evidence, bool is_blamed) const;
  std::string observe_full(const std::string& name, RegionState& region, const Evidence& evidence) const;

  int64_t patience() const { return options_.patience.value_or(0); }

  PrecisionGuardOptions options_;
  std::map<std::string, RegionState> regions_;
};

}  // namespace snug::detail
