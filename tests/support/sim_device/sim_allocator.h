#pragma once
// The caching allocator of the simulated accelerator. Like CUDA's it decides on the host, in the order of host calls:
// a block that is freed can be given out again at once to the stream that it was made for. Unlike CUDA's it does not
// split blocks. Freed blocks are overwritten with 0xFF, in the order of their stream.

#include <string>

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace snug::sim_device {

c10::Allocator* device_allocator();

/// The block will not be given out again before what is on the stream when it is freed has run. Does nothing for
/// memory whose deleter is not the allocator's, as on CUDA.
void record_stream(const c10::DataPtr& data, c10::Stream stream);

/// What a call of an operator takes of the stream's device and keeps (see ProductWorkspaces).
void take_workspace(const std::string& op, c10::Stream stream);

/// Whether the pointer lies in a device's memory.
bool is_device_pointer(const void* pointer);

}  // namespace snug::sim_device
