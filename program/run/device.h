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

/// "cpu"; the name of the process's accelerator, such as "cuda" or "xpu", for its current device; or one of its
/// devices, such as "cuda:1". Throws ConfigError for any other name, also for a device that is not there; the message
/// begins with `where` and lists the devices that are.
c10::Device parse_device(std::string_view where, const std::string& name);

/// Makes `device` the current one of this thread, so that nothing is allocated on another by default. Returns it.
/// Does nothing for the CPU and for a device without an index.
c10::Device make_current(c10::Device device);

/// Asks CUDA's allocator for segments that grow (expandable_segments), which leave fewer gaps between tensors. Its
/// other settings stay, and so does one of these segments. Holds for the whole process, so it is for programs. Does
/// nothing for other devices.
void use_growing_segments(c10::Device device);

/// module.to(device), also where LibTorch's C++ modules refuse it: for a backend of one's own (PrivateUse1). There the
/// parameters must not have been used by autograd yet.
void move_to(torch::nn::Module& module, c10::Device device);

}  // namespace snug
