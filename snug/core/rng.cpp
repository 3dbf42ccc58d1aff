#include "snug/core/rng.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include <ATen/Context.h>
#include <fmt/format.h>

#include "snug/core/error.h"

namespace snug {
namespace {

at::Tensor get_state(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

const at::Generator& cpu_generator() { return at::globalContext().defaultGenerator(c10::Device(c10::DeviceType::CPU)); }

std::vector<c10::Device> cuda_devices_in_use() {
  std::vector<c10::Device> devices;
  if (!at::globalContext().hasCUDA()) {
    return devices;
  }
  const auto& hooks = at::detail::getCUDAHooks();
  for (c10::DeviceIndex i = 0; i < static_cast<c10::DeviceIndex>(hooks.deviceCount()); ++i) {
    if (hooks.hasPrimaryContext(i)) {
      devices.emplace_back(c10::DeviceType::CUDA, i);
    }
  }
  return devices;
}

// A state that the generator would refuse is found here, before any generator is changed.
const at::Tensor& checked(const StateDict& dict, const std::string& name, const at::Generator& generator) {
  const auto& saved = dict.get<at::Tensor>(name);
  const at::Tensor now = get_state(generator);
  if (!saved.defined() || !saved.is_cpu() || saved.scalar_type() != now.scalar_type() || saved.sizes() != now.sizes()) {
    throw CorruptFile(
        fmt::format("RngState.from_state_dict: '{}' is not a state of this generator, which is {} bytes on the CPU; "
                    "was it saved by "
                    "another version of torch?",
                    name, now.numel()));
  }
  return saved;
}

}  // namespace

RngState RngState::capture() {
  RngState state;
  state.cpu_ = get_state(cpu_generator());
  for (const c10::Device device : cuda_devices_in_use()) {
    state.cuda_.emplace_back(device, get_state(at::globalContext().defaultGenerator(device)));
  }
  return state;
}

bool RngState::operator==(const RngState& other) const {
  const auto same = [](const at::Tensor& a, const at::Tensor& b) {
    return a.nbytes() == b.nbytes() && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
  };
  return same(cpu_, other.cpu_) &&
         std::equal(cuda_.begin(), cuda_.end(), other.cuda_.begin(), other.cuda_.end(),
                    [&](const auto& a, const auto& b) { return a.first == b.first && same(a.second, b.second); });
}

void RngState::restore() const {
  set_state(cpu_generator(), cpu_);
  for (const auto& [device, state] : cuda_) {
    set_state(at::globalContext().defaultGenerator(device), state);
  }
}

StateDict RngState::state_dict() const {
  StateDict result;
  result.set("cpu", cpu_);
  for (const auto& [device, state] : cuda_) {
    result.set(device.str(), state);
  }
  return result;
}

RngState RngState::from_state_dict(const StateDict& dict) {
  RngState state;
  state.cpu_ = checked(dict, "cpu", cpu_generator());
  for (const c10::Device device : cuda_devices_in_use()) {
    if (dict.contains(device.str())) {
      state.cuda_.emplace_back(device, checked(dict, device.str(), at::globalContext().defaultGenerator(device)));
    }
  }
  return state;
}

}  // namespace snug
