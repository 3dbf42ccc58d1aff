#pragma once
// Pinned memory of the host: copies between it and a device are tasks of a stream, for which the host does not wait.

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace snug::sim_device {

c10::Allocator* pinned_allocator();
/// Also for a pointer into the middle of a block, here and below.
bool is_pinned_pointer(const void* pointer);

/// The stream's tasks so far, and those to come until it is freed, use the block. Its memory stays for them.
/// Returns whether the pointer is to pinned memory.
bool use_pinned(const void* pointer, c10::Stream stream);

}  // namespace snug::sim_device
