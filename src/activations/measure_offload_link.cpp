#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "snug/offload.h"
#include "src/activations/spill_file.h"

namespace snug {
namespace {

using Clock = std::chrono::steady_clock;
using detail::SpillFile;
using detail::SpillMemory;

constexpr size_t kTries = 3;
constexpr int64_t kSmall = 4096, kLarge = int64_t{32} << 20, kLeast = int64_t{1} << 20;

// The memory is not a tensor's, so no budget counts it. The memory is not filled, because the time of filling would
// count as time of a read.
SpillMemory allocate(int64_t bytes) {
  const std::shared_ptr<char[]> memory(new char[static_cast<size_t>(bytes)]);
  return {memory, memory.get(), bytes};
}

struct Seconds {
  double out, back;
};

Seconds transfer(SpillFile& file, int64_t bytes) {
  SpillMemory memory = allocate(bytes);
  std::memset(memory.data, 1, static_cast<size_t>(bytes));
  const auto began = Clock::now();
  const auto piece = file.store(std::move(memory));
  piece->finish();
  const auto written = Clock::now();
  const SpillMemory again = piece->load();
  return {.out = std::chrono::duration<double>(written - began).count(),
          .back = std::chrono::duration<double>(Clock::now() - written).count()};
}

// Measures by events, on a separate stream.
Seconds transfer(c10::Device device, int64_t bytes) {
  const auto options = at::TensorOptions(at::kByte);
  const at::Tensor there = at::empty({bytes}, options.device(device));
  const at::Tensor here = at::empty({bytes}, options.pinned_memory(true));
  const c10::impl::VirtualGuardImpl of(device.type());
  const c10::Stream computing = of.getStream(there.device()), side = of.getStreamFromGlobalPool(there.device());
  const auto mark = [&](const c10::Stream& stream) {
    c10::Event event(device.type(), c10::EventFlag::BACKEND_DEFAULT);  // flag for an event with a time
    event.record(stream);
    return event;
  };
  mark(computing).block(side);
  const c10::StreamGuard guard(side);
  const c10::Event began = mark(side);
  here.copy_(there, /*non_blocking=*/true);
  const c10::Event out = mark(side);
  there.copy_(here, /*non_blocking=*/true);
  const c10::Event back = mark(side);
  back.synchronize();
  constexpr double kMillisecond = 1e-3;
  return {.out = began.elapsedTime(out) * kMillisecond, .back = out.elapsedTime(back) * kMillisecond};
}

// Returns the median of a few tries.
Seconds middle(const std::function<Seconds()>& transfer) {
  std::array<double, kTries> out{}, back{};
  for (size_t i = 0; i < kTries; ++i) {
    const Seconds seconds = transfer();
    out[i] = seconds.out;
    back[i] = seconds.back;
  }
  std::sort(out.begin(), out.end());
  std::sort(back.begin(), back.end());
  return {out[kTries / 2], back[kTries / 2]};
}

// The small transfer's time is not subtracted: the time is close to nothing, and by chance may even be longer.
OffloadLink link_of(const std::function<Seconds(int64_t bytes)>& transfer, int64_t bytes = kLarge) {
  const Seconds small = middle([&] { return transfer(kSmall); }), large = middle([&] { return transfer(bytes); });
  const auto speed = [&](double seconds) { return static_cast<double>(bytes) / seconds; };
  return {.out_bytes_per_second = speed(large.out),
          .back_bytes_per_second = speed(large.back),
          .seconds = std::max(small.out, small.back)};
}

}  // namespace

OffloadLink measure_offload_link(const std::filesystem::path& directory) {
  const std::filesystem::path folder = detail::spill_folder(directory);
  SpillFile file(folder, std::numeric_limits<int64_t>::max(), &allocate);
  OffloadLink link = link_of([&](int64_t bytes) { return transfer(file, bytes); });
  if (const SaveOnHost::Report report = file.report(); report.failed_writes > 0) {
    throw Error("measure_offload_link: " + report.failure + "; give a directory on another disk");
  }
  link.directory = folder.string();
  return link;
}

OffloadLink measure_offload_link(const std::filesystem::path& directory, c10::Device device) {
  if (device.is_cpu()) {
    return measure_offload_link(directory);
  }
  if (!directory.empty()) {
    throw ConfigError(fmt::format(
        "measure_offload_link: memory of {} goes to host memory, and the directory '{}' has no use; give none",
        device.str(), directory.string()));
  }
  const std::function<Seconds(int64_t)> measure = [&](int64_t bytes) { return transfer(device, bytes); };
  OffloadLink link;
  for (int64_t bytes = kLarge; !link.is_open(); bytes /= 8) {
    try {
      link = link_of(measure, bytes);
    } catch (const c10::OutOfMemoryError&) {  // a limit leaves less room
      if (bytes <= kLeast) {
        throw;
      }
    }
  }
  link.kind = OffloadLink::Kind::Pinned;
  return link;
}

}  // namespace snug
