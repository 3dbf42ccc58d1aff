#include "program/run/spike_watch.h"

#include <cmath>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"

namespace snug::detail::spike_watch_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A watch that has seen losses about 2, which vary by 0.1, and norms about 1.
SpikeWatch after(size_t steps) {
  SpikeWatch watch;
  for (size_t i = 0; i < steps; ++i) {
    EXPECT_THAT(watch.judge(i % 2 == 0 ? 1.9 : 2.1, i % 2 == 0 ? 0.5 : 1.0), IsEmpty());
  }
  return watch;
}

TEST(SpikeWatch, NamesWhatIsNotFiniteFromTheFirstStepOn) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(SpikeWatch().judge(kNan, 1), HasSubstr("the loss is nan"));
  EXPECT_THAT(SpikeWatch().judge(1, std::numeric_limits<double>::infinity()), HasSubstr("norm inf"));
}

TEST(SpikeWatch, NamesALossOfMoreThanSixDeviationsAboveTheMedian) {
  EXPECT_THAT(after(64).judge(2.98, 1), IsEmpty());  // 2.1 + 6 * 0.2 / 1.349 = 2.9896
  EXPECT_THAT(after(64).judge(3.00, 1), HasSubstr("the loss is 3"));
  EXPECT_THAT(after(64).judge(-100, 1), IsEmpty());
}

TEST(SpikeWatch, IsNotMisledByTheFallOfTheLossAtTheBeginning) {
  SpikeWatch watch;
  for (int i = 0; i < 10; ++i) {
    watch.judge(std::exp(-i), 1);
  }
  for (int i = 0; i < 20; ++i) {
    watch.judge(i % 2 == 0 ? 0.001 : 0.002, 1);
  }
  EXPECT_THAT(watch.judge(0.5, 1), HasSubstr("the loss is 0.5"));
}

TEST(SpikeWatch, NamesANormOfMoreThanTenTimesTheLargest) {
  EXPECT_THAT(after(64).judge(2, 9.9), IsEmpty());
  EXPECT_THAT(after(64).judge(2, 10.1), HasSubstr("norm is 10.1"));
}

TEST(SpikeWatch, ComparesWithSixteenStepsAndMore) {
  EXPECT_THAT(after(SpikeWatch::kLeast - 1).judge(100, 1000), IsEmpty());
  EXPECT_THAT(after(SpikeWatch::kLeast).judge(100, 1000), HasSubstr("the 16 steps before"));
}

TEST(SpikeWatch, LeavesWhatIsOutOfLineOutOfTheWindow) {
  SpikeWatch watch = after(64);
  watch.judge(1000, 1);
  EXPECT_THAT(watch.judge(1000, 1), HasSubstr("the loss is 1000"));
}

TEST(SpikeWatch, GoesOnFromASnapshotAsItWas) {
  SpikeWatch watch = after(20), other;
  watch.judge(1.0 / 3, 1e-310);
  other.restore(watch.numbers());
  EXPECT_EQ(other.numbers(), watch.numbers());
  EXPECT_EQ(other.judge(100, 1), watch.judge(100, 1));
  other.restore("");
  EXPECT_THAT(other.judge(100, 1000), IsEmpty());
  EXPECT_THROW(other.restore("1 2 x"), ConfigError);
}

}  // namespace
}  // namespace snug::detail::spike_watch_test
