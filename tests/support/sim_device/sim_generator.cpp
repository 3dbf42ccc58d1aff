#include "tests/support/sim_device/sim_generator.h"

#include <vector>

#include <ATen/CPUGeneratorImpl.h>

#include "tests/support/sim_device/sim_device.h"

namespace snug::sim_device {
namespace {

struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(c10::Device of) : CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = of;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }

 private:
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device_);
    copy->set_state(*get_state());
    return copy;
  }
};

}  // namespace

at::Generator make_generator(c10::DeviceIndex index) { return at::make_generator<DeviceGenerator>(device(index)); }

const at::Generator& default_generator(c10::DeviceIndex index) {
  static const auto* const generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (c10::DeviceIndex i = 0; i < kDevices; ++i) {
      made->push_back(make_generator(i));
    }
    return made;
  }();
  return generators->at(static_cast<size_t>(index));
}

void take_state(const at::Generator& from, const at::Generator& to) {
  auto& target = *to.get<at::CPUGeneratorImpl>();
  target.set_state(*from.get<at::CPUGeneratorImpl>()->get_state());
}

at::Generator cpu_copy_of(const at::Generator& generator) {
  auto copy = at::make_generator<at::CPUGeneratorImpl>();
  take_state(generator, copy);
  return copy;
}

}  // namespace snug::sim_device
