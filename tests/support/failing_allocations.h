#pragma once
// for_each_failing_allocation: makes a round for each allocation of tensor memory in a call, which fails in that round.
// The memory is the CPU's, or that of a sweep's device.
//
//   const int64_t failures = for_each_failing_allocation([&](FailingAllocation& allocation) {
//     Ema ema(parameters);
//     const bool failed = allocation.stops([&] { ema.update(); });
//     ASSERT_EQ(ema.updates(), failed ? 0 : 1);
//   });
//   EXPECT_GE(failures, 9);
//
// In the last round no allocation fails, since the call makes fewer. A sweep without a failure fails the test.

#include <cstdint>
#include <functional>
#include <utility>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "src/memory/device_memory.h"

namespace snug::testing {

/// The `number`-th allocation of tensor memory after arm(), from 1, fails. 0: none does.
class FailingAllocation {
 public:
  explicit FailingAllocation(int64_t number, c10::DeviceType device = c10::DeviceType::CPU)
      : memory_(detail::device_memory(device)), number_(number) {}
  ~FailingAllocation() { disarm(); }
  FailingAllocation(const FailingAllocation&) = delete;
  FailingAllocation& operator=(const FailingAllocation&) = delete;

  void arm() {
    memory_.fail_after(number_);
    is_armed_ = true;
  }
  void disarm() {
    if (std::exchange(is_armed_, false)) {
      has_failed_ |= memory_.fail_after(0) == 0 && number_ > 0;
    }
  }
  /// Whether it failed while it was armed. The call may have gone on all the same.
  bool has_failed() const { return has_failed_; }

  /// Makes the call with the allocation armed. True if the call threw `Thrown`, which nothing but the failure may
  /// cause.
  template <class Thrown = c10::OutOfMemoryError, class Call>
  bool stops(Call&& call) {
    bool is_stopped = false;
    arm();
    try {
      call();
    } catch (const Thrown&) {
      is_stopped = true;
    }
    disarm();
    EXPECT_TRUE(has_failed_ || !is_stopped) << "the call ran out of memory, though no allocation was made to fail";
    return is_stopped;
  }

 private:
  detail::DeviceMemory& memory_;
  const int64_t number_;
  bool is_armed_ = false;
  bool has_failed_ = false;
};

struct AllocationSweep {
  bool fails_here = true;                   ///< false in a process in which no allocation is to fail
  bool is_thinned = false;                  ///< allocation k is followed by k + 1 + k / 16
  std::function<bool(bool)> anywhere = {};  ///< Whether it failed in any process, from whether it did in this one
  c10::DeviceType device = c10::DeviceType::CPU;
};

/// Calls round(allocation) for the first allocation, the second and so on, up to the first round in which it does not
/// fail. Stops at the first failure of the test. Returns the number of allocations that failed.
template <class Round>
int64_t for_each_failing_allocation(const AllocationSweep& sweep, Round&& round) {
  constexpr int64_t kAtMost = 5000;
  int64_t failures = 0;
  for (int64_t number = 1; number <= kAtMost; number += sweep.is_thinned ? 1 + number / 16 : 1) {
    SCOPED_TRACE(::testing::Message() << "allocation " << number << " fails");
    FailingAllocation allocation(sweep.fails_here ? number : 0, sweep.device);
    round(allocation);
    allocation.disarm();
    if (::testing::Test::HasFailure()) {
      return failures;
    }
    if (!(sweep.anywhere ? sweep.anywhere(allocation.has_failed()) : allocation.has_failed())) {
      EXPECT_GT(failures, 0) << "no allocation failed, so this sweep tests nothing";
      return failures;
    }
    ++failures;
  }
  ADD_FAILURE() << "there is no end to the allocations: " << kAtMost << " rounds";
  return failures;
}

template <class Round>
int64_t for_each_failing_allocation(Round&& round) {
  return for_each_failing_allocation(AllocationSweep(), std::forward<Round>(round));
}

}  // namespace snug::testing
