#include "src/precision/scaled_gradients.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <map>
#include <unordered_set>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/optim/optimizer.h>

#include "src/core/in_parts.h"
#include "src/core/lazy_values.h"
#include "src/precision/loss_scale.h"

namespace snug::detail {

void ParameterNames::set(const std::vector<std::pair<std::string, at::Tensor>>& names) {
  names_.clear();
  for (const auto& [name, parameter] : names) {
    names_[parameter.unsafeGetTensorImpl()] = name;
  }
}

std::string ParameterNames::describe(const ParameterPlace& place) const {
  const auto known = names_.find(place.parameter.unsafeGetTensorImpl());
  const auto name = known != names_.end() ? fmt::format("'{}'", known->second)
                                          : fmt::format("{} of group {}", place.index, place.group);
  return fmt::format("parameter {} [{}]", name, fmt::join(place.parameter.sizes(), ", "));
}

std::vector<ParameterPlace> gradients_of(const torch::optim::Optimizer& optimizer) {
  std::vector<ParameterPlace> places;
  std::unordered_set<const void*> seen;  // a parameter of a shared module may be named twice
  for (size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    const auto& parameters = optimizer.param_groups()[group].params();
    for (size_t index = 0; index < parameters.size(); ++index) {
      if (parameters[index].grad().defined() &&
          seen.insert(resolved_gradient(parameters[index]).unsafeGetTensorImpl()).second) {
        places.push_back({parameters[index], group, index});
      }
    }
  }
  return places;
}

namespace {

// Embedding layers may give sparse gradients. Only the values of a sparse gradient are scaled.
at::Tensor values_of(const at::Tensor& gradient) { return gradient.is_sparse() ? gradient._values() : gradient; }

// One scalar for each CPU thread that may find a number that is not finite. The scalars are made before anything is
// written, so that nothing can fail halfway.
std::vector<at::Tensor> one_for_each_thread(c10::Device device) {
  std::vector<at::Tensor> scalars;
  for (int thread = 0; thread < (device.is_cpu() ? at::get_num_threads() : 1); ++thread) {
    scalars.push_back(scalar_on(device, 0.0));
  }
  return scalars;
}

void unscale(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& found_by_thread,
             const at::Tensor& inverse) {
  const auto fused = [&](at::TensorList some) {
    const bool is_cpu = some.front().is_cpu();
    at::Tensor found = found_by_thread[is_cpu ? static_cast<size_t>(at::get_thread_num()) : 0];
    at::_amp_foreach_non_finite_check_and_unscale_(some, found, inverse);
  };
  call_in_parts(fused, gradients);
}

at::Tensor any_of(const std::vector<at::Tensor>& found_by_thread) {
  for (const at::Tensor& found : found_by_thread) {
    if (found_by_thread.size() > 1 && *found.const_data_ptr<float>() != 0) {
      return found;
    }
  }
  return found_by_thread.front();
}

}  // namespace

FoundInf unscale_and_check(const std::vector<ParameterPlace>& places, const at::Tensor& inverse) {
  struct ByDevice {
    c10::Device device;
    at::Tensor inverse;
    std::vector<at::Tensor> found_by_thread;
    std::map<c10::ScalarType, std::vector<at::Tensor>> gradients;
  };
  std::vector<ByDevice> devices;
  for (const ParameterPlace& place : places) {
    const at::Tensor values = values_of(place.parameter.grad());
    const c10::Device device = values.device();
    auto entry = std::find_if(devices.begin(), devices.end(), [&](const ByDevice& d) { return d.device == device; });
    if (entry == devices.end()) {
      devices.push_back({device, inverse.to(device, true), one_for_each_thread(device), {}});
      entry = std::prev(devices.end());
    }
    entry->gradients[values.scalar_type()].push_back(values);
  }
  FoundInf result;
  for (auto& entry : devices) {
    for (auto& [dtype, gradients] : entry.gradients) {
      unscale(gradients, entry.found_by_thread, entry.inverse);
    }
    result.emplace_back(entry.device, any_of(entry.found_by_thread));
  }
  return result;
}

FoundInf check_finite(const std::vector<ParameterPlace>& places) {
  std::vector<at::Tensor> on_host;  // read only; LibTorch's kernel that unscales writes each gradient back
  for (const ParameterPlace& place : places) {
    const at::Tensor values = values_of(place.parameter.grad());
    if (!values.is_cpu() || values.scalar_type() != at::kFloat || !values.is_non_overlapping_and_dense()) {
      return unscale_and_check(places, scalar_on(places.front().parameter.device(), 1.0));
    }
    on_host.push_back(values);
  }
  if (on_host.empty()) {
    return {};
  }
  std::atomic<bool> finite = true;
  in_parts(on_host, [&](size_t i, const Part& part) {
    // In the order of memory: at::aminmax would copy other tensors. NaN if a value is NaN.
    const at::Tensor& gradient = on_host[i];
    const auto [least, most] =
        at::aminmax(gradient.as_strided({part.end - part.begin}, {1}, gradient.storage_offset() + part.begin));
    if (!std::isfinite(least.item<float>()) || !std::isfinite(most.item<float>())) {
      finite = false;
    }
  });
  return {{at::kCPU, scalar_on(at::kCPU, finite ? 0.0 : 1.0)}};
}

std::string first_non_finite(const std::vector<ParameterPlace>& places, const ParameterNames& names) {
  for (const ParameterPlace& place : places) {
    const at::Tensor& gradient = place.parameter.grad();
    if (!gradient.defined()) {
      continue;
    }
    const at::Tensor values = values_of(gradient).flatten();
    const at::Tensor bad = values.isfinite().logical_not().nonzero();
    if (bad.numel() > 0) {
      return fmt::format("{}, whose gradient holds {}", names.describe(place),
                         values[bad[0].item<int64_t>()].item<double>());
    }
  }
  return {};
}

}  // namespace snug::detail
