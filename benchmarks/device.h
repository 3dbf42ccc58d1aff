#pragma once
// The device of a benchmark: `--device cuda` among its arguments, else the CPU.

#include <algorithm>
#include <string_view>

#include "program/run/device.h"

namespace snug::benchmarks {

/// Takes --device and the value out of the arguments, and makes the device current.
inline c10::Device take_device(int& argc, char** argv) {
  char** const end = argv + argc;
  char** const found = std::find(argv, end, std::string_view("--device"));
  if (end - found < 2) {
    return c10::Device(c10::kCPU);
  }
  const c10::Device device = make_current(parse_device("benchmark", found[1]));
  use_growing_segments(device);
  std::rotate(found, found + 2, end);
  argc -= 2;
  return device;
}

}  // namespace snug::benchmarks
