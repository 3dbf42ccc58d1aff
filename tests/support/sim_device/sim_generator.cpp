#include "tests/support/sim_device/sim_generator.h"

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <mutex>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include "tests/support/sim_device/sim_device.h"

namespace snug::sim_device {
namespace {

using torch::jit::Stack;

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

// `to` will give the same numbers as `from`; each of the CPU or of a device.
void take_state(const at::Generator& from, const at::Generator& to) {
  auto& target = *to.get<at::CPUGeneratorImpl>();
  target.set_state(*from.get<at::CPUGeneratorImpl>()->get_state());
}

// A CPU's generator that gives the same numbers.
at::Generator cpu_copy_of(const at::Generator& generator) {
  auto copy = at::make_generator<at::CPUGeneratorImpl>();
  take_state(generator, copy);
  return copy;
}

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

Draw::Draw(const c10::OperatorHandle& op, const Stack& stack, c10::Device device) {
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) {
    return;
  }
  const auto& arguments = op.schema().arguments();
  const auto found = std::ranges::find(arguments, "generator", &c10::Argument::name);
  if (found != arguments.end()) {
    argument_ = static_cast<size_t>(std::distance(arguments.begin(), found));
  }
  const bool is_given = argument_ && !stack.at(*argument_).isNone();
  device_ = is_given ? stack.at(*argument_).toGenerator() : default_generator(device.index());
  const std::lock_guard lock(device_.mutex());
  before_ = cpu_copy_of(device_);
}

void Draw::run(const c10::OperatorHandle& kernel, Stack& stack) {
  constexpr c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);
  if (!before_.defined()) {
    kernel.redispatchBoxed(kCpu, &stack);
    return;
  }
  after_ = cpu_copy_of(before_);
  if (argument_) {
    stack.at(*argument_) = after_;
    kernel.redispatchBoxed(kCpu, &stack);
    return;
  }
  const at::Generator& cpu = at::globalContext().defaultGenerator(c10::DeviceType::CPU);
  const at::Generator of_cpu = cpu_copy_of(cpu);
  take_state(after_, cpu);
  kernel.redispatchBoxed(kCpu, &stack);
  take_state(cpu, after_);
  take_state(of_cpu, cpu);
}

void Draw::finish() {
  if (after_.defined()) {
    const std::lock_guard lock(device_.mutex());
    take_state(after_, device_);
  }
}

// For Python, where torch.manual_seed asks a device's module.
extern "C" void sim_device_manual_seed(uint64_t seed) {
  for (c10::DeviceIndex i = 0; i < kDevices; ++i) {
    at::Generator generator = default_generator(i);
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

}  // namespace snug::sim_device
