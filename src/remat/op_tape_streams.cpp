#include <algorithm>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "src/remat/op_tape.h"

// The streams of a device that use a storage. The program has put its own operators in order. What runs again, or comes
// back from a store, does so on the stream that asks first, and each other one that asks later waits for it.

namespace snug::detail {
namespace {

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

void wait_for(const c10::Stream& earlier, const c10::Stream& stream) {
  c10::Event event(stream.device_type());
  event.record(earlier);
  event.block(stream);
}

}  // namespace

// The current stream has made it, or reads it first.
void OpTape::begin_streams(int storage, const c10::Storage& memory) {
  at(storage).streams.assign(1, current_stream(memory.device()));
}

// The allocator has to hear of the stream from the tape: from others it hears nothing of memory that is watched.
void OpTape::add_stream(int storage, const c10::Storage& memory, const c10::Stream& stream) {
  auto& streams = at(storage).streams;
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
    c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(allocated(memory.data_ptr()), stream);
    streams.push_back(stream);
  }
}

// An operator of the program, which the program has put in order. record_stream() names a stream.
void OpTape::note_streams(const TapeOperator& record, int named) {
  for (const TapeOperator::Operand& operand : record.operands) {
    const int storage = operand.value.storage;
    const c10::Stream first = at(storage).streams.front();
    const c10::Stream stream =
        named < 0 ? current_stream(first.device()) : record.arguments[static_cast<size_t>(named)].toStream();
    if (stream != first) {
      add_stream(storage, at(storage).holding.find(), stream);
    }
  }
}

// What the current stream is given from here on finds its values.
void OpTape::meet_stream(int storage, const c10::Storage& memory) {
  const auto& streams = at(storage).streams;
  const c10::Stream current = current_stream(memory.device());
  if (std::find(streams.begin(), streams.end(), current) == streams.end()) {
    wait_for(streams.front(), current);
    add_stream(storage, memory, current);
  }
}

// The stream that has made it, which waits for all others.
c10::Stream OpTape::gather_streams(int storage) {
  const auto& streams = at(storage).streams;
  for (size_t i = 1; i < streams.size(); ++i) {
    wait_for(streams[i], streams.front());
  }
  return streams.front();
}

}  // namespace snug::detail
