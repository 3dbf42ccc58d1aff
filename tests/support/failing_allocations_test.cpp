#include "tests/support/failing_allocations.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace snug::failing_allocations_test {
namespace {

using testing::FailingAllocation;
using testing::for_each_failing_allocation;

TEST(ForEachFailingAllocation, MakesARoundForEachAllocationAndOneWithoutFailure) {
  int rounds = 0, stopped = 0;
  const int64_t failures = for_each_failing_allocation([&](FailingAllocation& allocation) {
    ++rounds;
    stopped += allocation.stops([] {
      torch::empty({1});
      try {
        torch::empty({1});
      } catch (const c10::OutOfMemoryError&) {  // the call goes on
      }
      torch::empty({1});
    });
  });
  EXPECT_EQ(failures, 3);
  EXPECT_EQ(rounds, 4);
  EXPECT_EQ(stopped, 2);
}

TEST(ForEachFailingAllocation, FailsATestWithoutAllocations) {
  EXPECT_NONFATAL_FAILURE(for_each_failing_allocation([](FailingAllocation& allocation) { allocation.stops([] {}); }),
                          "tests nothing");
}

TEST(ForEachFailingAllocation, FailsATestThatRunsOutOfMemoryByItself) {
  FailingAllocation none(0);
  EXPECT_NONFATAL_FAILURE(none.stops([] { throw c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "full"); }),
                          "no allocation was made to fail");
}

}  // namespace
}  // namespace snug::failing_allocations_test
