#include "src/kernels/finite.h"

#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/simd_targets.h"

namespace snug::kernels::finite_test {
namespace {

/// Each test runs with every instruction set that this processor has.
class Finite : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { detail::use_simd_target(GetParam()); }
  void TearDown() override { detail::use_simd_target(""); }
};
INSTANTIATE_TEST_SUITE_P(, Finite, ::testing::ValuesIn(detail::simd_targets()),
                         [](const auto& target) { return target.param; });

TEST_P(Finite, TakesWhateverFp32Holds) {
  using Limits = std::numeric_limits<float>;
  const std::vector<float> values{
      0.0f, -0.0f, 1.0f, Limits::max(), Limits::lowest(), Limits::min(), Limits::denorm_min()};
  std::vector<float> many;
  for (int i = 0; i < 1000; ++i) {
    many.push_back(values[static_cast<size_t>(i) % values.size()]);
  }
  EXPECT_TRUE(all_finite(many.data(), 1000));
  EXPECT_TRUE(all_finite(nullptr, 0));
}

TEST_P(Finite, FindsOneBadValueWhereverItIsAndNoneBeyondTheEnd) {
  for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                          std::numeric_limits<float>::quiet_NaN()}) {
    for (const size_t count : {1u, 7u, 64u, 131u}) {
      std::vector<float> values(count + 1, 1.0f);
      values[count] = bad;
      EXPECT_TRUE(all_finite(values.data(), static_cast<int64_t>(count)));
      values[count] = 1.0f;
      for (size_t i = 0; i < count; ++i) {
        values[i] = bad;
        EXPECT_FALSE(all_finite(values.data(), static_cast<int64_t>(count))) << bad << " at " << i << " of " << count;
        values[i] = 1.0f;
      }
    }
  }
}

}  // namespace
}  // namespace snug::kernels::finite_test
