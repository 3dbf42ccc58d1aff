#pragma once
// measure_offload_link: the speed of the way to disk or to host memory and back, for plans that may offload.

#include <filesystem>

#include "snug/planner/profile.h"

namespace c10 {
struct Device;
}

namespace snug {

/// Measures the speed of writing to a file in `directory` (empty: the system's temporary one) and of reading back, for
/// plans that may offload. It writes and reads 32 MiB a few times. These bytes stay in the system's cache if there is
/// room, so a plan that offloads much more may find the disk slower. A directory that is itself memory (tmpfs) is as
/// fast as memory, and offloading to it frees nothing. Throws Error if the file cannot be made, written or read.
OffloadLink measure_offload_link(const std::filesystem::path& directory = {});
/// The same for tensors of `device`. If that is not the CPU, the link leads to pinned memory of the host. 32 MiB are
/// copied there and back a few times, which take as much of the device's memory meanwhile, and are waited for. Throws
/// ConfigError if a directory is given all the same, and c10::OutOfMemoryError.
OffloadLink measure_offload_link(const std::filesystem::path& directory, c10::Device device);

}  // namespace snug
