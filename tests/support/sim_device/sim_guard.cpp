// What LibTorch asks of a device: which is current, its streams and events, its generators.

#include <cstdlib>
#include <string_view>

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "src/remat/operator_clock.h"
#include "tests/support/sim_device/sim_allocator.h"
#include "tests/support/sim_device/sim_device.h"
#include "tests/support/sim_device/sim_generator.h"
#include "tests/support/sim_device/sim_pinned.h"
#include "tests/support/sim_device/sim_stream.h"

namespace snug::sim_device {
namespace {

c10::DeviceIndex index_or_current(c10::DeviceIndex index) { return index < 0 ? current_device() : index; }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Device getDevice() const override { return device(current_device()); }
  c10::Device exchangeDevice(c10::Device to) const override {
    return device(exchange_device(index_or_current(to.index())));
  }
  void setDevice(c10::Device to) const override { exchangeDevice(to); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { exchange_device(index_or_current(to.index())); }

  c10::Stream getStream(c10::Device of) const override { return current_stream(of.index()); }
  c10::Stream getDefaultStream(c10::Device of) const override { return default_stream(index_or_current(of.index())); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    return pool_stream(index_or_current(of.index()));
  }
  c10::Stream getNewStream(c10::Device of, int) const override { return pool_stream(index_or_current(of.index())); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override { return is_over(end_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { run_until(end_of(stream)); }
  void synchronizeDevice(const c10::DeviceIndex index) const override { run_all(index_or_current(index)); }

  // An event is a Mark.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    destroyEvent(*event, stream.device_index());
    *event = new Mark(end_of(stream));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      sim_device::block(stream, *static_cast<Mark*>(event));
    }
  }
  bool queryEvent(void* event) const override { return event == nullptr || is_over(*static_cast<Mark*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      run_until(*static_cast<Mark*>(event));
    }
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return (static_cast<Mark*>(to)->seconds - static_cast<Mark*>(from)->seconds) * 1e3;
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchange_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override { return exchange_device(index); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchange_device(index_or_current(index));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index_or_current(index));
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return make_generator(index_or_current(index));
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override { return is_pinned_pointer(data); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

const bool is_registered = [] {
  const char* const wanted = std::getenv("SNUG_ACCELERATOR");
  if (wanted != nullptr && std::string_view(wanted) == "cuda") {
    return false;
  }
  c10::register_privateuse1_backend("sim");
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  detail::set_host_clock(&host_seconds);  // as that of the device
  detail::set_device_sleep(&sim_device::sleep);
  return true;
}();

}  // namespace

bool is_present() { return is_registered; }

}  // namespace snug::sim_device
