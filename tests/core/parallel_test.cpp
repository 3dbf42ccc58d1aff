#include "src/core/parallel.h"

#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

namespace snug::detail::parallel_test {
namespace {

class ParallelFor : public ::testing::Test {
 protected:
  ParallelFor() { at::set_num_threads(2); }
  ~ParallelFor() override { at::set_num_threads(before_); }
  const int before_ = at::get_num_threads();
};

// One thread would be right as well, but half as fast.
TEST_F(ParallelFor, RunsOnLibTorchsThreadsAndCutsAtTheGrain) {
  std::mutex mutex;
  std::map<std::pair<size_t, int64_t>, int64_t> parts;
  std::set<std::thread::id> threads;
  const std::vector<int64_t> counts{1050, 0, 7, 100, 250, 0};
  parallel_for(counts, 100, [&](size_t i, int64_t begin, int64_t end) {
    const std::lock_guard lock(mutex);
    parts[{i, begin}] = end;
    threads.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(threads.size(), 2u);
  std::vector<int64_t> covered(counts.size(), 0);
  for (const auto& [where, end] : parts) {
    EXPECT_EQ(where.second, covered[where.first]);
    EXPECT_EQ(where.second % 100, 0);
    covered[where.first] = end;
  }
  EXPECT_EQ(covered, counts);
}

TEST_F(ParallelFor, DoesNothingForNothing) {
  parallel_for({}, 8, [](size_t, int64_t, int64_t) { FAIL(); });
  parallel_for({0, 0}, 8, [](size_t, int64_t, int64_t) { FAIL(); });
}

}  // namespace
}  // namespace snug::detail::parallel_test
