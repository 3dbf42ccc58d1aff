#pragma once
// A simulated accelerator "sim" with two devices, for tests of what snug does on a GPU. Its kernels are those of the
// CPU, on memory of its own, so results have the same bits. Dispatch, device threads, streams, events, the caching
// allocator and autocast are the code that LibTorch has for any accelerator. What a program of tests links against it
// has the accelerator from its start on.
//
//   const Tensor x = torch::randn({4, 4}, sim_device::device());
//   const sim_device::FailingAllocation failing(3);  // the third allocation from here on throws

#include <cstdint>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>

namespace snug::sim_device {

/// Not if the environment has SNUG_ACCELERATOR=cuda.
bool is_present();

constexpr int kDevices = 2;
constexpr int64_t kBlock = 512;                     ///< Sizes of allocations are multiples of it, as CUDA's are.
constexpr int64_t kTotalBytes = int64_t{16} << 30;  ///< The memory of one device.

/// Virtual times. They are powers of two, so sums and differences are exact.
constexpr double kOperatorSeconds = 0x1p-17;
constexpr double kBytesPerSecond = 0x1p33;  ///< Between host and device.

c10::Device device(int index = 0);

/// The allocator's own figures.
c10::CachingDeviceAllocator::DeviceStats stats(c10::Device of = device());

/// Allocations that would need more reserved bytes throw c10::OutOfMemoryError. Returns the earlier limit.
int64_t set_limit(int64_t bytes, c10::Device of = device());

/// While it lives, the allocator keeps snug's limits, or it does not, as that of many accelerators. Limits live within.
class [[nodiscard]] WithCap {
 public:
  explicit WithCap(bool has_cap);
  ~WithCap();
  WithCap(const WithCap&) = delete;
  WithCap& operator=(const WithCap&) = delete;

 private:
  bool before_;
};

/// Makes allocation number `countdown` from now on, on any device, throw c10::OutOfMemoryError; 0: none. Returns the
/// rest of the earlier countdown.
int64_t fail_after(int64_t countdown);

/// The same for pinned memory of the host.
int64_t fail_pinned_after(int64_t countdown);

/// While it lives, allocation number `countdown` on any device throws c10::OutOfMemoryError, once; 1 is the next one.
class [[nodiscard]] FailingAllocation {
 public:
  explicit FailingAllocation(int64_t countdown);
  ~FailingAllocation();
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;

  /// The allocation that throws has come.
  static bool has_failed();
};

constexpr int64_t kWorkspaceBytes = 1 << 20;

/// While it lives, a stream's first matrix product takes kWorkspaceBytes, which stay until the end, as CUDA's do.
class [[nodiscard]] ProductWorkspaces {
 public:
  ProductWorkspaces();
  ~ProductWorkspaces();
  ProductWorkspaces(const ProductWorkspaces&) = delete;
  ProductWorkspaces& operator=(const ProductWorkspaces&) = delete;
};

/// How often the host has waited for a value of a device: item(), copies to pageable memory, operators whose result's
/// size depends on values.
int64_t host_reads();

/// When the work that is queued on the current stream will be done. Starts at 0.
double virtual_seconds(c10::Device of = device());

/// Until when the host has waited. It takes no time itself, but that of HostPace.
double host_seconds();

/// While it lives, the host works for so many seconds to give a stream a kernel or a copy. A kernel that is shorter
/// does not keep the device busy: the host sets the pace.
class [[nodiscard]] HostPace {
 public:
  explicit HostPace(double seconds);
  ~HostPace();
  HostPace(const HostPace&) = delete;
  HostPace& operator=(const HostPace&) = delete;
};

constexpr double kSleepSeconds = 0x1p-10;
/// Gives the current stream a sleep of kSleepSeconds.
void sleep(c10::Device of);

/// While it lives, kernels and copies do not run when they are called. They run when the host waits for their stream,
/// or for an event behind them: the waited-for stream first, all others not before something demands it. A missing
/// event, or memory that is reused too early, therefore gives wrong bytes each time. At the end all of them run.
/// `side_streams_at_once`: what is called on streams of the pool runs at once, after what it waits for, and so as early
/// as it may.
class [[nodiscard]] LazyStreams {
 public:
  explicit LazyStreams(bool side_streams_at_once = false);
  ~LazyStreams();
  LazyStreams(const LazyStreams&) = delete;
  LazyStreams& operator=(const LazyStreams&) = delete;
};

}  // namespace snug::sim_device
