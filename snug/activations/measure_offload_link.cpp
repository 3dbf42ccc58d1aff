#include "snug/activations/measure_offload_link.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <utility>

#include "snug/activations/detail/spill_file.h"
#include "snug/activations/offload.h"
#include "snug/core/error.h"

namespace snug {
namespace {

using Clock = std::chrono::steady_clock;
using detail::SpillFile;
using detail::SpillMemory;

constexpr size_t kTries = 3;

// Not a tensor's memory, so that no budget counts it. Not filled, because that time would count as time of a read.
SpillMemory allocate(int64_t bytes) {
  const std::shared_ptr<char[]> memory(new char[static_cast<size_t>(bytes)]);
  return {memory, memory.get(), bytes};
}

struct Seconds {
  double out, back;
};

// The middle one of a few tries.
Seconds transfer(SpillFile& file, int64_t bytes) {
  std::array<double, kTries> out{}, back{};
  for (size_t i = 0; i < kTries; ++i) {
    SpillMemory memory = allocate(bytes);
    std::memset(memory.data, static_cast<int>(i) + 1, static_cast<size_t>(bytes));
    const auto began = Clock::now();
    const auto piece = file.store(std::move(memory));
    piece->finish();
    const auto written = Clock::now();
    const SpillMemory again = piece->load();
    out[i] = std::chrono::duration<double>(written - began).count();
    back[i] = std::chrono::duration<double>(Clock::now() - written).count();
  }
  std::sort(out.begin(), out.end());
  std::sort(back.begin(), back.end());
  return {out[kTries / 2], back[kTries / 2]};
}

}  // namespace

OffloadLink measure_offload_link(const std::filesystem::path& directory) {
  constexpr int64_t kSmall = 4096, kLarge = int64_t{32} << 20;
  const std::filesystem::path folder = detail::spill_folder(directory);
  SpillFile file(folder, std::numeric_limits<int64_t>::max(), &allocate);
  const Seconds small = transfer(file, kSmall), large = transfer(file, kLarge);
  if (const OffloadReport report = file.report(); report.failed_writes > 0) {
    throw Error("measure_offload_link: " + report.failure + "; give a directory on another disk");
  }
  // The small transfer's time is not subtracted: it is close to nothing, and by chance may even be longer.
  const auto speed = [](double seconds) { return static_cast<double>(kLarge) / seconds; };
  return {.directory = folder.string(),
          .out_bytes_per_second = speed(large.out),
          .back_bytes_per_second = speed(large.back),
          .seconds = std::max(small.out, small.back)};
}

}  // namespace snug
