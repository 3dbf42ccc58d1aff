#pragma once
// Pinned memory of the host: copies between it and a device are tasks of a stream, for which the host does not wait.

#include <c10/core/Allocator.h>

namespace snug::sim_device {

c10::Allocator* pinned_allocator();
bool is_pinned_pointer(const void* pointer);  ///< Also for a pointer into the middle of a block.

}  // namespace snug::sim_device
