#pragma once
// Devices by the names that users write.
//
//   const c10::Device device = snug::make_current(snug::parse_device("my_program", argv[1]));

#include <string>
#include <string_view>

#include <c10/core/Device.h>

namespace torch::nn {
class Module;
}

namespace snug {

/// The device with the given name. "cpu"; the name of the process's accelerator, such as "cuda" or "xpu", for the
/// accelerator's current device; or one of the accelerator's devices, such as "cuda:1". Throws ConfigError for any
/// other name, also for a missing device; the message begins with `where` and lists the existing devices.
c10::Device parse_device(std::string_view where, const std::string& name);

/// Makes `device` the current device of this thread, so that nothing is allocated on another device by default. Returns
/// `device`. Does nothing for the CPU and for a device without an index.
c10::Device make_current(c10::Device device);

/// Asks CUDA's allocator for segments that grow (expandable_segments), which leave fewer gaps between tensors. The
/// allocator's other settings stay, and a value that is already set for growing segments stays, too. The setting holds
/// for the whole process, so use_growing_segments is for programs. Does nothing for other devices.
void use_growing_segments(c10::Device device);

/// module.to(device), also for devices that LibTorch's C++ modules refuse: a backend of one's own (PrivateUse1). For
/// such a backend autograd must not have used the parameters yet.
void move_to(torch::nn::Module& module, c10::Device device);

}  // namespace snug
