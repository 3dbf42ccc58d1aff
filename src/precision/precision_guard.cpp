#include "src/precision/precision_guard.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "snug/core.h"

namespace snug::detail {
namespace {

std::string title(const std::string& region) { return region.empty() ? "the whole step" : "'" + region + "'"; }

}  // namespace

PrecisionGuard::PrecisionGuard(PrecisionGuardOptions options) : options_(options) {
  if (patience() < 0) {
    throw ConfigError(
        fmt::format("PrecisionGuard: patience is {}; give a number of steps, or 0 for no guard", patience()));
  }
  if (options.stay < 1) {
    throw ConfigError(fmt::format("PrecisionGuard: stay is {}; it must be >= 1 step", options.stay));
  }
  if (!(options.underflow > 0 && options.underflow <= 1)) {
    throw ConfigError(
        fmt::format("PrecisionGuard: underflow is {}; it is a share, so it must be in (0, 1]", options.underflow));
  }
}

bool PrecisionGuard::is_full(const std::string& name) const {
  const auto found = regions_.find(name);
  return found != regions_.end() && found->second.is_full;
}

std::set<std::string> PrecisionGuard::full_regions() const {
  std::set<std::string> full;
  for (const auto& [name, region] : regions_) {
    if (region.is_full) {
      full.insert(name);
    }
  }
  return full;
}

std::vector<std::string> PrecisionGuard::observe(const std::vector<std::pair<std::string, Evidence>>& step) {
  const auto last = std::find_if(step.rbegin(), step.rend(),
                                 [&](const auto& entry) { return entry.second.non_finite && !is_full(entry.first); });
  std::vector<std::string> changes;
  for (const auto& [name, evidence] : step) {
    RegionState& region = regions_[name];
    const bool is_blamed = last != step.rend() && last->first == name;
    std::string change =
        region.is_full ? observe_full(name, region, evidence) : observe_low(name, region, evidence, is_blamed);
    if (!change.empty()) {
      changes.push_back(std::move(change));
    }
  }
  return changes;
}

std::string PrecisionGuard::observe_low(const std::string& name, RegionState& region, const Evidence& evidence,
                                        bool is_blamed) const {
  constexpr double kMoreThanFull = 0.1;
  const bool underflows = evidence.zeros > std::max(options_.underflow, region.zeros_in_full + kMoreThanFull);
  if (region.since_back > 0) {
    ++region.since_back;
  }
  region.streak = is_blamed || underflows ? region.streak + 1 : 0;
  if (region.streak < patience()) {
    return {};
  }
  const bool is_relapse = region.since_back > 0 && region.since_back <= 2 * patience();
  region.stay = is_relapse ? 2 * region.stay : options_.stay;
  region.is_full = true;
  const auto steps = std::exchange(region.streak, 0);
  return is_blamed ? fmt::format("{} goes to float32: non-finite gradients for {} steps", title(name), steps)
                   : fmt::format("{} goes to float32: {:.0f} % of its gradients were zero for {} steps", title(name),
                                 100 * evidence.zeros, steps);
}

std::string PrecisionGuard::observe_full(const std::string& name, RegionState& region, const Evidence& evidence) const {
  if (!evidence.non_finite) {
    region.zeros_in_full = evidence.zeros;
  }
  if (++region.streak < region.stay) {
    return {};
  }
  region.is_full = false;
  region.since_back = 1;
  return fmt::format("{} goes back to 16 bits after {} steps", title(name), std::exchange(region.streak, 0));
}

}  // namespace snug::detail
