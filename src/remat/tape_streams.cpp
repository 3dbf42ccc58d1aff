#include <algorithm>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "src/core/has_bytes.h"
#include "src/remat/tape_storages.h"

// Device streams that use a storage
//
// Problem: a replay, or a load from the store, runs on the stream of the first request. A later request may come on
// another stream, without an order between the two streams.
//
// Choice: the program has already ordered the program's own operators. For storages made again or loaded, the first
// requesting stream makes the contents, and each other stream that asks later waits for the first stream. The tape also
// reports each stream to the allocator.

namespace snug::detail {
namespace {

c10::Stream current_stream(c10::Device device) {
  return device.is_cpu() ? c10::Stream(c10::Stream::DEFAULT, device)  // asked for each operand of each operator
                         : c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

void wait_for(const c10::Stream& earlier, const c10::Stream& stream) {
  c10::Event event(stream.device_type());
  event.record(earlier);
  event.block(stream);
}

}  // namespace

// The current stream has made the contents, or is the first reader.
void TapeStorages::begin_streams(int storage, const c10::Storage& memory) {
  at(storage).streams.assign(1, current_stream(memory.device()));
}

// Reports the stream to the allocator. Nobody else can report the use of watched memory.
void TapeStorages::add_stream(int storage, const c10::Storage& memory, const c10::Stream& stream) {
  auto& streams = at(storage).streams;
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
    c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(allocated(memory_of(memory)), stream);
    streams.push_back(stream);
  }
}

// Notes that an operator of the program uses the storage, on the current stream or on the stream that the operator
// names, as record_stream() does. The program has ordered the operator.
void TapeStorages::note_stream(int storage, std::optional<c10::Stream> named) {
  const c10::Stream first = at(storage).streams.front();
  const c10::Stream stream = named ? *named : current_stream(first.device());
  if (stream != first) {
    add_stream(storage, at(storage).holding.find(), stream);
  }
}

// Makes work queued later on the current stream wait for the storage's values.
void TapeStorages::meet_stream(int storage, const c10::Storage& memory) {
  const auto& streams = at(storage).streams;
  const c10::Stream current = current_stream(memory.device());
  if (std::find(streams.begin(), streams.end(), current) == streams.end()) {
    wait_for(streams.front(), current);
    add_stream(storage, memory, current);
  }
}

// Returns the stream that has made the contents, after making this stream wait for all other streams.
c10::Stream TapeStorages::gather_streams(int storage) {
  const auto& streams = at(storage).streams;
  for (size_t i = 1; i < streams.size(); ++i) {
    wait_for(streams[i], streams.front());
  }
  return streams.front();
}

}  // namespace snug::detail
