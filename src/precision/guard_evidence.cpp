#include "src/precision/guard_evidence.h"

#include <cmath>
#include <limits>
#include <string_view>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "src/core/file_memory.h"
#include "src/core/lazy_values.h"
#include "src/core/read_later.h"

namespace snug::detail {
namespace {

bool belongs(const std::string& parameter, const std::string& region) {
  return parameter == region || (parameter.size() > region.size() && parameter[region.size()] == '.' &&
                                 parameter.compare(0, region.size(), region) == 0);
}

// [largest absolute value, elements that are not 0] of each gradient, in FP64, on the gradients' device. Two passes
// over each gradient that only read. Unlike a sum, the largest value is finite if and only if all values are.
at::Tensor largest_and_nonzeros(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> largest, nonzeros;
  for_each_in_files(gradients, [&](at::TensorList some) {
    if (!some.front().is_cpu()) {
      const auto norms = at::_foreach_norm(some, std::numeric_limits<double>::infinity());
      largest.insert(largest.end(), norms.begin(), norms.end());
    }
    for (const at::Tensor& gradient : some) {
      if (gradient.is_cpu()) {  // where the norm takes four times as long
        const auto [low, high] = at::aminmax(gradient);
        largest.push_back(at::maximum(low.neg(), high));
      }
      nonzeros.push_back(at::count_nonzero(gradient));
    }
  });
  return at::stack({at::stack(largest).to(at::kDouble), at::stack(nonzeros).to(at::kDouble)});
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

std::function<GradientEvidence()> gradient_evidence(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                                                    const std::vector<std::string>& regions) {
  const at::NoGradGuard no_grad;
  std::map<std::string, std::vector<size_t>> in_region;  // indices of gradients
  std::vector<at::Tensor> gradients;
  for (const auto& [name, parameter] : parameters) {
    if (!parameter.grad().defined()) {
      continue;
    }
    const at::Tensor& own = resolved_gradient(parameter);
    const at::Tensor gradient = own.is_sparse() ? own._values() : own;
    bool in_a_region = false;
    const auto add_to = [&](const std::string& region) {
      std::vector<size_t>& indices = in_region[region];
      if (gradient.numel() > 0) {  // LibTorch has no largest value of no values
        indices.push_back(gradients.size());
      }
    };
    for (const std::string& region : regions) {
      if (belongs(name, region)) {
        add_to(region);
        in_a_region = true;
      }
    }
    if (!in_a_region) {
      add_to("");
    }
    if (gradient.numel() > 0) {
      gradients.push_back(gradient);
    }
  }
  std::vector<std::string> names{""};
  names.insert(names.end(), regions.begin(), regions.end());
  std::erase_if(names, [&](const std::string& name) { return !in_region.contains(name); });
  std::vector<double> elements;
  for (const at::Tensor& gradient : gradients) {
    elements.push_back(static_cast<double>(gradient.numel()));
  }
  const auto counted = gradients.empty() ? nullptr : read_later(largest_and_nonzeros(gradients));
  return [names = std::move(names), in_region = std::move(in_region), elements = std::move(elements), counted] {
    const at::Tensor table = counted ? counted() : at::empty({2, 0}, at::kDouble);
    const auto rows = table.accessor<double, 2>();
    GradientEvidence evidence;
    for (const std::string& name : names) {
      PrecisionGuard::Evidence of_region;
      double all = 0, nonzeros = 0;
      for (const size_t i : in_region.at(name)) {
        const auto column = static_cast<int64_t>(i);
        of_region.non_finite = of_region.non_finite || !std::isfinite(rows[0][column]);
        nonzeros += rows[1][column];
        all += elements[i];
      }
      of_region.zeros = all > 0 ? (all - nonzeros) / all : 0;
      evidence.emplace_back(name, of_region);
    }
    return evidence;
  };
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
