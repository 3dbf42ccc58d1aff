#include "snug/core/rng.h"

#include <mutex>

#include <ATen/Context.h>
#include <fmt/format.h>

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

}  // namespace

RngState RngState::capture() {
  RngState state;
  state.cpu_ = get_state(cpu_generator());
  for (const c10::Device device : cuda_devices_in_use()) {
    state.cuda_.emplace_back(device, get_state(at::globalContext().defaultGenerator(device)));
  }
  return state;
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
  state.cpu_ = dict.get<at::Tensor>("cpu");
  for (const c10::Device device : cuda_devices_in_use()) {
    if (dict.contains(device.str())) {
      state.cuda_.emplace_back(device, dict.get<at::Tensor>(device.str()));
    }
  }
  return state;
}

}  // namespace snug
