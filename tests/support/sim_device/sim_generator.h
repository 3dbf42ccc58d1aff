#pragma once
// Random numbers on the simulated accelerator: a generator of the CPU that says it is of the device. The host knows its
// state without waiting, as with CUDA's.

#include <ATen/core/Generator.h>

namespace snug::sim_device {

at::Generator make_generator(c10::DeviceIndex index);
const at::Generator& default_generator(c10::DeviceIndex index);

/// A CPU's generator that gives the same numbers.
at::Generator cpu_copy_of(const at::Generator& generator);

/// `to` will give the same numbers as `from`; each of the CPU or of a device.
void take_state(const at::Generator& from, const at::Generator& to);

}  // namespace snug::sim_device
