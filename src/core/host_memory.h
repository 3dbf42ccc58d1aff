#pragma once
// An allocation in the host's memory for a model on a device.
//
// A lack of the host's memory is no lack of the budget's memory, which is the device's, and no other plan of a Stepper
// is a cure. So the lack is Error instead of an error of an allocator.

#include <exception>
#include <string_view>

#include <fmt/format.h>

#include "snug/core.h"
#include "snug/state.h"
#include "src/core/first_line.h"

namespace snug::detail {

/// The result of `allocate`. `use`: what needs the memory; `cure`: what the user may do besides freeing memory.
/// Throws Error if the host has too little memory.
template <class Allocate>
auto in_host_memory(std::string_view caller, std::string_view use, std::string_view cure, const Allocate& allocate) {
  try {
    return allocate();
  } catch (const std::exception& error) {
    if (!is_out_of_memory(error)) {
      throw;
    }
    throw Error(fmt::format("{}: the host has too little memory for {}: {}; free memory of the host, {}", caller, use,
                            first_line(error), cure));
  }
}

}  // namespace snug::detail
