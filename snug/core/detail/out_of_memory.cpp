#include "snug/core/detail/out_of_memory.h"

#include <algorithm>
#include <array>
#include <string_view>

#include <c10/util/Exception.h>

#include "snug/core/error.h"

// LibTorch's allocators throw OutOfMemoryError. CUDA, and what cuBLAS, cuDNN and others allocate by themselves, fail
// with a c10::Error that has the name of the status in its text. What has come through an interpreter, TorchScript's or
// Python's, has the interpreter's type, and the text of the first.

namespace snug::detail {

bool is_out_of_memory(const std::exception& error) {
  constexpr std::array<std::string_view, 7> kTexts = {"CUDA error: out of memory",    "CUDA out of memory",
                                                      "_STATUS_ALLOC_FAILED",         "CUFFT_ALLOC_FAILED",
                                                      "DEVICE_ALLOCATION_FAILED",     "MemoryLimit: an allocation of",
                                                      "MemoryLimit: an operator took"};
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr) {
    return true;
  }
  if (dynamic_cast<const Error*>(&error) != nullptr) {
    return false;  // snug's own may quote another
  }
  const auto* of_libtorch = dynamic_cast<const c10::Error*>(&error);
  const std::string_view text = of_libtorch != nullptr ? of_libtorch->what_without_backtrace() : error.what();
  return std::any_of(kTexts.begin(), kTexts.end(),
                     [&](std::string_view one) { return text.find(one) != std::string_view::npos; });
}

}  // namespace snug::detail
