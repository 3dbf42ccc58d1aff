#include "src/precision/precision_guard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"

namespace snug::precision_guard_test {
namespace {

using detail::PrecisionGuard;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Step = std::vector<std::pair<std::string, PrecisionGuard::Evidence>>;

Step step(PrecisionGuard::Evidence rest, PrecisionGuard::Evidence a, PrecisionGuard::Evidence b) {
  return {{"", rest}, {"a", a}, {"b", b}};
}
const PrecisionGuard::Evidence kGood{.non_finite = false, .zeros = 0};
const PrecisionGuard::Evidence kBad{.non_finite = true, .zeros = 0};
const PrecisionGuard::Evidence kZeros{.non_finite = false, .zeros = 0.9};

TEST(PrecisionGuard, MovesOnlyWhatPersists) {
  PrecisionGuard guard({.patience = 3});
  for (int i = 0; i < 10; ++i) {
    EXPECT_THAT(guard.observe(step(kGood, kBad, kGood)), IsEmpty());
    EXPECT_THAT(guard.observe(step(kGood, kBad, kGood)), IsEmpty());
    EXPECT_THAT(guard.observe(step(kGood, kGood, kGood)), IsEmpty());
  }
  guard.observe(step(kGood, kBad, kGood));
  guard.observe(step(kGood, kBad, kGood));
  EXPECT_THAT(guard.observe(step(kGood, kBad, kGood)), ElementsAre(HasSubstr("'a' goes to float32: non-finite")));
  EXPECT_TRUE(guard.is_full("a"));
  EXPECT_FALSE(guard.is_full("b"));
}

// Backward carries an infinity from b into a and the rest. Only b is to blame; and if b in FP32 is no cure, the one
// before it.
TEST(PrecisionGuard, BlamesTheLastRegionThatIsNotInFp32Yet) {
  PrecisionGuard guard({.patience = 1, .stay = 100});
  EXPECT_THAT(guard.observe(step(kBad, kBad, kBad)), ElementsAre(HasSubstr("'b'")));
  EXPECT_THAT(guard.observe(step(kBad, kBad, kBad)), ElementsAre(HasSubstr("'a'")));
  EXPECT_THAT(guard.observe(step(kBad, kBad, kBad)), ElementsAre(HasSubstr("the whole step")));
  EXPECT_THAT(guard.full_regions(), ElementsAre("", "a", "b"));
}

TEST(PrecisionGuard, GoesBackAndStaysLongerAfterARelapse) {
  PrecisionGuard guard({.patience = 1, .stay = 4});
  const auto steps_in_full = [&] {
    guard.observe(step(kGood, kGood, kBad));
    int steps = 0;
    while (guard.is_full("b")) {
      guard.observe(step(kGood, kGood, kGood));
      ++steps;
    }
    return steps;
  };
  EXPECT_EQ(steps_in_full(), 4);
  EXPECT_EQ(steps_in_full(), 8);
  EXPECT_EQ(steps_in_full(), 16);
  for (int i = 0; i < 10; ++i) {
    guard.observe(step(kGood, kGood, kGood));
  }
  EXPECT_EQ(steps_in_full(), 4) << "trouble after a good while is new trouble";
}

TEST(PrecisionGuard, TakesZerosForUnderflowUnlessFp32HasThemToo) {
  PrecisionGuard guard({.patience = 2, .stay = 3});
  guard.observe(step(kGood, kZeros, kGood));
  EXPECT_THAT(guard.observe(step(kGood, kZeros, kGood)), ElementsAre(HasSubstr("90 % of its gradients were zero")));
  for (int i = 0; i < 3; ++i) {
    guard.observe(step(kGood, kZeros, kGood));  // in FP32 they are zero as well
  }
  EXPECT_FALSE(guard.is_full("a"));
  for (int i = 0; i < 10; ++i) {
    EXPECT_THAT(guard.observe(step(kGood, kZeros, kGood)), IsEmpty());
  }
}

TEST(PrecisionGuard, GoesOnFromItsState) {
  PrecisionGuard a({.patience = 2});
  a.observe(step(kGood, kBad, kGood));
  PrecisionGuard b({.patience = 2});
  b.restore(a.regions());
  EXPECT_EQ(b.observe(step(kGood, kBad, kGood)), a.observe(step(kGood, kBad, kGood)));
  EXPECT_TRUE(b.is_full("a"));
}

TEST(PrecisionGuard, RefusesOptionsOutOfRange) {
  EXPECT_THROW(PrecisionGuard({.patience = -1}), ConfigError);
  EXPECT_THROW(PrecisionGuard({.stay = 0}), ConfigError);
  EXPECT_THROW(PrecisionGuard({.underflow = 0}), ConfigError);
}

}  // namespace
}  // namespace snug::precision_guard_test
