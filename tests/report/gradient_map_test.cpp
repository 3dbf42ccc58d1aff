#include "program/report/gradient_map.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "program/report/html_report.h"

namespace snug::detail::gradient_map_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

RunEvent sample(int64_t step, const std::string& parameter, const std::string& exponents) {
  return {.name = kGradientsEvent,
          .step = step,
          .details = {{"parameter", parameter},
                      {"elements", int64_t{200}},
                      {"zeros", int64_t{50}},
                      {"non_finite", int64_t{3}},
                      {"lowest_exponent", int64_t{-40}},
                      {"exponents", exponents}}};
}

TEST(GradientMap, DrawsTheLastSampleWithSharesAndTheEndOfFp16) {
  std::string counts = "0 0 100";
  for (int i = 0; i < 58; ++i) {
    counts += " 1";
  }
  const std::string page = gradient_map({sample(5, "old", counts), sample(10, "a<b", counts)}, 1024);
  EXPECT_THAT(page, AllOf(HasSubstr("at step 10"), HasSubstr("a&lt;b"), Not(HasSubstr("old")), HasSubstr("25 %"),
                          HasSubstr("<td>3</td>")));
  EXPECT_THAT(page, HasSubstr("<rect x=\"2\" width=\"1.02\" height=\"1\" opacity=\"0.92\"/>"));  // 1 + log10(0.5) / 4
  EXPECT_THAT(page, AllOf(HasSubstr("M16.00 0V1"), HasSubstr("M6.00 0V1")));  // -24 and, with 2^10, -34
  EXPECT_THAT(gradient_map({sample(10, "w", counts)}, 1), Not(HasSubstr("M6.00 0V1")));
}

TEST(GradientMap, TellsTheUpdatesThatWereLostWhereTheyWereMeasured) {
  RunEvent measured = sample(1, "w", "1 2 3");
  EXPECT_THAT(gradient_map({measured}, 1), Not(HasSubstr("too small")));
  measured.details.emplace_back("lost_updates", 0.125);
  EXPECT_THAT(gradient_map({measured}, 1), AllOf(HasSubstr("<td>12.5 %</td>"), HasSubstr("too small")));
}

TEST(GradientMap, IsNotThereWithoutSamplesOrWithBrokenOnes) {
  EXPECT_EQ(gradient_map({}, 1), "");
  EXPECT_EQ(gradient_map({{.name = "snapshot", .step = 3, .details = {}}}, 1), "");
  EXPECT_EQ(gradient_map({{.name = kGradientsEvent, .step = 3, .details = {{"parameter", std::string("w")}}}}, 1), "");
  EXPECT_EQ(gradient_map({sample(3, "w", "no numbers")}, 1), "");
}

TEST(GradientMap, IsInTheReportAndItsEventsAreNotListed) {
  RunHistory history;
  history.events = {sample(1, "layer.weight", "1 2 3"), {.name = "precision", .step = 1, .details = {}}};
  const std::string page = html_report(history, {});
  EXPECT_THAT(page, AllOf(HasSubstr("Sizes of gradients at step 1"), HasSubstr("Events (1)")));
}

}  // namespace
}  // namespace snug::detail::gradient_map_test
