// Hooks and meter of snug's for a Python process, by ctypes.

#include <any>
#include <cstdint>
#include <optional>

#include "snug/memory.h"

namespace {

std::optional<snug::SavedTensorHooks> hooks;
std::optional<snug::MemoryMeter> meter;
int64_t packed = 0;

}  // namespace

extern "C" {

void hooks_on() {
  packed = 0;
  hooks.emplace(
      [](const at::Tensor& tensor) {
        ++packed;
        return std::any(tensor.detach());
      },
      [](std::any& kept) { return std::any_cast<at::Tensor&>(kept); });
}

/// How many tensors went through them.
int64_t hooks_off() {
  hooks.reset();
  return packed;
}

void meter_on() { meter.emplace(); }

/// Bytes that autograd held at the peak.
int64_t meter_off() {
  const int64_t activations = meter->report().activations;
  meter.reset();
  return activations;
}
}
