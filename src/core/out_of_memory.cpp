#include <algorithm>
#include <array>
#include <span>
#include <string_view>

#include <c10/util/Exception.h>

#include "snug/core.h"
#include "snug/state.h"
#include "src/core/limit_below_use.h"

// LibTorch's allocators throw OutOfMemoryError. Failures in CUDA, and in allocations that cuBLAS, cuDNN and other
// libraries make by themselves, are a c10::Error with the name of the status in the text. An error that has come
// through an interpreter (TorchScript, Python) has the interpreter's type, and the text of the first error.
// TorchScript's error is a c10::Error from LibTorch 2.15 on.

namespace snug {
namespace {

bool has_any(std::string_view text, std::span<const std::string_view> parts) {
  return std::any_of(parts.begin(), parts.end(),
                     [&](std::string_view part) { return text.find(part) != std::string_view::npos; });
}

constexpr std::array<std::string_view, 5> kOfStatus = {"CUDA error: out of memory", "CUDA out of memory",
                                                       "_STATUS_ALLOC_FAILED", "CUFFT_ALLOC_FAILED",
                                                       "DEVICE_ALLOCATION_FAILED"};
// The texts of MemoryLimit, and of LibTorch's allocator on a CPU.
constexpr std::array<std::string_view, 4> kOfAllocators = {"MemoryLimit: an allocation of", "MemoryLimit: an operator",
                                                           "can't allocate memory", "not enough memory: you tried"};

}  // namespace

bool is_out_of_memory(const std::exception& error) {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
      dynamic_cast<const detail::LimitBelowUse*>(&error) != nullptr) {
    return true;
  }
  if (const auto* of_libtorch = dynamic_cast<const c10::Error*>(&error)) {
    const std::string_view text = of_libtorch->what_without_backtrace();
    const bool is_interpreters = text.find("failed in the TorchScript interpreter") != std::string_view::npos;
    return has_any(text, kOfStatus) || (is_interpreters && has_any(text, kOfAllocators));
  }
  if (dynamic_cast<const Error*>(&error) != nullptr) {
    return false;  // snug's own error may quote another error
  }
  return has_any(error.what(), kOfStatus) || has_any(error.what(), kOfAllocators);
}

}  // namespace snug
