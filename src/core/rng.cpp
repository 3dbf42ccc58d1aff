#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "snug/state.h"
#include "src/core/generators.h"

namespace snug {
namespace {

at::Generator default_generator(c10::Device device) { return at::globalContext().defaultGenerator(device); }

// The generators in use; the CPU's generator comes first.
std::vector<at::Generator> generators_in_use() {
  std::vector<at::Generator> generators{default_generator(c10::Device(c10::DeviceType::CPU))};
  const auto accelerator = at::getAccelerator();
  if (!accelerator) {
    return generators;
  }
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(accelerator);
  for (c10::DeviceIndex i = 0; i < hooks.deviceCount(); ++i) {
    if (hooks.hasPrimaryContext(i)) {
      generators.push_back(default_generator(c10::Device(*accelerator, i)));
    }
  }
  return generators;
}

at::Generator copy_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.clone();
}

// Reads a saved state. If the generator would refuse the state, the function throws before any generator is changed.
at::Generator read(const StateDict& dict, const std::string& name, const at::Generator& generator) {
  const auto& saved = dict.get<at::Tensor>(name);
  at::Generator copy = copy_of(generator);
  const int64_t bytes = copy.get_state().numel();
  try {
    copy.set_state(saved);  // checks the saved state
  } catch (const std::exception&) {
    throw CorruptFile(
        fmt::format("RngState.from_state_dict: '{}' is not a state of this generator, which is {} bytes on the CPU; "
                    "was it saved by another version of torch?",
                    name, bytes));
  }
  return copy;
}

}  // namespace

struct RngState::Copies {
  std::vector<at::Generator> of_device;  // at most one generator per device; the CPU's generator is the first
};

RngState RngState::capture() {
  auto copies = std::make_shared<Copies>();
  for (const at::Generator& generator : generators_in_use()) {
    copies->of_device.push_back(copy_of(generator));
  }
  return RngState(std::move(copies));
}

bool RngState::operator==(const RngState& other) const {
  const auto &ours = copies_->of_device, &theirs = other.copies_->of_device;
  return std::equal(ours.begin(), ours.end(), theirs.begin(), theirs.end(), [](const auto& a, const auto& b) {
    return a.device() == b.device() && detail::have_same_state(a, b);
  });
}

bool RngState::is_current() const {
  const auto& ours = copies_->of_device;
  const auto now = generators_in_use();
  return std::equal(ours.begin(), ours.end(), now.begin(), now.end(), [](const auto& copy, at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    return copy.device() == generator.device() && detail::have_same_state(copy, generator);
  });
}

void RngState::restore() const {
  for (const at::Generator& copy : copies_->of_device) {
    at::Generator generator = default_generator(copy.device());
    const std::lock_guard lock(generator.mutex());
    detail::copy_state(copy, generator);
  }
}

StateDict RngState::state_dict() const {
  StateDict result;
  for (const at::Generator& copy : copies_->of_device) {
    result.set(copy.device().str(), copy.get_state());
  }
  return result;
}

RngState RngState::from_state_dict(const StateDict& dict) {
  auto copies = std::make_shared<Copies>();
  for (const at::Generator& generator : generators_in_use()) {
    const std::string name = generator.device().str();
    if (generator.device().is_cpu() || dict.contains(name)) {
      copies->of_device.push_back(read(dict, name, generator));
    }
  }
  return RngState(std::move(copies));
}

Stateful stateful_rng() {
  return {[] { return RngState::capture().state_dict(); },
          [](const StateDict& state) { RngState::from_state_dict(state).restore(); }};
}

}  // namespace snug
