#include "program/run/device.h"

#include <algorithm>
#include <string>
#include <vector>

#include <ATen/DeviceAccelerator.h>
#include <c10/core/AllocatorConfig.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include "snug/core.h"
#include "src/memory/weights_on_host.h"

namespace snug {
namespace {

std::vector<c10::Device> devices_there() {
  std::vector<c10::Device> there{c10::Device(c10::kCPU)};
  const c10::DeviceIndex count = at::accelerator::deviceCount();
  if (count > 0) {
    const c10::DeviceType type = *at::accelerator::getAccelerator();
    there.emplace_back(type);
    for (c10::DeviceIndex index = 0; index < count; ++index) {
      there.emplace_back(type, index);
    }
  }
  return there;
}

}  // namespace

c10::Device parse_device(std::string_view where, const std::string& name) {
  std::vector<std::string> names;
  for (const c10::Device device : devices_there()) {
    if (device.str() == name) {
      return device;
    }
    names.push_back(device.str());
  }
  throw ConfigError(fmt::format(
      "{}: LibTorch finds no device '{}' here; give one of those that it finds ({}), or use a LibTorch and a driver "
      "for it",
      where, name, fmt::join(names, ", ")));
}

c10::Device make_current(c10::Device device) {
  if (device.has_index() && !device.is_cpu()) {
    at::accelerator::setDeviceIndex(device.index());
  }
  return device;
}

void use_growing_segments(c10::Device device) {
  const std::string settings = c10::CachingAllocator::getAllocatorSettings();
  if (device.is_cuda() && settings.find("expandable_segments") == std::string::npos) {
    c10::CachingAllocator::setAllocatorSettings(settings + (settings.empty() ? "" : ",") + "expandable_segments:True");
  }
}

void move_to(torch::nn::Module& module, c10::Device device) {
  if (!device.is_privateuseone()) {
    module.to(device);
    return;
  }
  for (const at::Tensor& parameter : module.parameters()) {
    detail::replace_content(parameter, parameter.detach().to(device));
  }
  for (const at::Tensor& buffer : module.buffers()) {
    detail::replace_content(buffer, buffer.detach().to(device));
  }
}

}  // namespace snug
