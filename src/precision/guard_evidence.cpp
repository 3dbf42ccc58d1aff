#include "src/precision/guard_evidence.h"

#include <string_view>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include "snug/core.h"

namespace snug::detail {
namespace {

bool belongs(const std::string& parameter, const std::string& region) {
  return parameter == region || (parameter.size() > region.size() && parameter[region.size()] == '.' &&
                                 parameter.compare(0, region.size(), region) == 0);
}

// [1 if a number is not finite, zeros, elements] of some gradients, on the gradients' device. Two passes over each
// gradient that only read. The smallest and the largest number show inf and NaN. Unlike a sum, both are finite if all
// numbers are.
at::Tensor bad_zeros_elements(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> extremes, others;
  double elements = 0;
  for (const at::Tensor& gradient : gradients) {
    if (gradient.numel() > 0) {
      const auto [low, high] = at::aminmax(gradient);
      extremes.insert(extremes.end(), {low.to(at::kDouble), high.to(at::kDouble)});
    }
    others.push_back(at::count_nonzero(gradient));
    elements += static_cast<double>(gradient.numel());
  }
  if (extremes.empty()) {
    extremes.push_back(at::zeros({}, others.front().options().dtype(at::kDouble)));
  }
  const at::Tensor bad = at::isfinite(at::stack(extremes)).logical_not().any().to(at::kDouble);
  const at::Tensor zeros = elements - at::stack(others).sum().to(at::kDouble);
  return at::stack({bad, zeros, at::full_like(zeros, elements)});
}

// Calls f(name, field).
template <class Region, class F>
void each_field(Region& region, const F& f) {
  f("is_full", region.is_full);
  f("streak", region.streak);
  f("stay", region.stay);
  f("since_back", region.since_back);
  f("zeros_in_full", region.zeros_in_full);
}

}  // namespace

std::vector<std::pair<std::string, PrecisionGuard::Evidence>> gradient_evidence(
    const std::vector<std::pair<std::string, at::Tensor>>& parameters, const std::vector<std::string>& regions) {
  const at::NoGradGuard no_grad;
  std::map<std::string, std::vector<at::Tensor>> gradients;
  for (const auto& [name, parameter] : parameters) {
    if (!parameter.grad().defined()) {
      continue;
    }
    const at::Tensor gradient = parameter.grad().is_sparse() ? parameter.grad()._values() : parameter.grad();
    bool in_a_region = false;
    for (const std::string& region : regions) {
      if (belongs(name, region)) {
        gradients[region].push_back(gradient);
        in_a_region = true;
      }
    }
    if (!in_a_region) {
      gradients[""].push_back(gradient);
    }
  }
  std::vector<std::string> names{""};
  names.insert(names.end(), regions.begin(), regions.end());
  std::erase_if(names, [&](const std::string& name) { return !gradients.contains(name); });
  std::vector<at::Tensor> counts;
  for (const std::string& name : names) {
    counts.push_back(bad_zeros_elements(gradients[name]));
  }
  std::vector<std::pair<std::string, PrecisionGuard::Evidence>> evidence;
  if (names.empty()) {
    return evidence;
  }
  const at::Tensor table = at::stack(counts).cpu();
  const auto rows = table.accessor<double, 2>();
  for (size_t i = 0; i < names.size(); ++i) {
    const auto row = rows[static_cast<int64_t>(i)];
    evidence.emplace_back(
        names[i], PrecisionGuard::Evidence{.non_finite = row[0] > 0, .zeros = row[2] > 0 ? row[1] / row[2] : 0});
  }
  return evidence;
}

StateDict state_of(const PrecisionGuard& guard) {
  StateDict state;
  for (const auto& [name, region] : guard.regions()) {
    StateDict entry;
    each_field(region, [&](const char* field, const auto& value) { entry.set(field, value); });
    state.set("region:" + name, std::move(entry));
  }
  return state;
}

std::map<std::string, PrecisionGuard::RegionState> regions_from(const StateDict& state) {
  constexpr std::string_view kPrefix = "region:";
  std::map<std::string, PrecisionGuard::RegionState> regions;
  for (const auto& entry : state.entries()) {
    if (!entry.name.starts_with(kPrefix)) {
      throw CorruptFile(fmt::format(
          "Stepper.load_state_dict: the precision guard has an entry '{}', which is no region; load another snapshot",
          entry.name));
    }
    const auto& saved = state.get<StateDict>(entry.name);
    PrecisionGuard::RegionState region;
    each_field(region, [&]<class T>(const char* field, T& value) { value = saved.get<T>(field); });
    if (region.streak < 0 || region.stay < (region.is_full ? 1 : 0) || region.since_back < 0 ||
        !(region.zeros_in_full >= 0 && region.zeros_in_full <= 1)) {
      throw CorruptFile(fmt::format(
          "Stepper.load_state_dict: the precision guard's entry '{}' has streak {}, stay {}, since_back {} and "
          "zeros_in_full {}; counts must be >= 0 and a share in [0, 1]; load another snapshot",
          entry.name, region.streak, region.stay, region.since_back, region.zeros_in_full));
    }
    regions[entry.name.substr(kPrefix.size())] = region;
  }
  return regions;
}

}  // namespace snug::detail
