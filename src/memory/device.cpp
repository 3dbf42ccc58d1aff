#include "src/memory/device.h"

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "src/memory/operator_mode.h"

namespace snug::detail {

c10::Device ready(c10::Device device) {
  if (device.is_cpu()) {
    return device.type();
  }
  try {
    at::globalContext().lazyInitDevice(device.type());
    return device.has_index() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice();
  } catch (const c10::Error& error) {
    throw ConfigError(fmt::format("memory: device {} cannot be used: {}; use cpu, or a LibTorch and a driver for it",
                                  device.str(), error.what_without_backtrace()));
  }
}

// Makes two products, because another library may make a product with a bias.
void take_workspaces(c10::Device device) {
  if (!device.is_cpu()) {
    const UnseenOperators unseen;
    const c10::NoGradGuard no_grad;
    const at::Tensor factor = at::ones({16, 16}, device);
    at::mm(factor, factor);
    at::addmm(factor.select(0, 0), factor, factor);
  }
}

}  // namespace snug::detail
