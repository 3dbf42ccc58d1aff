// The parts that report pages are made of: axes, thinned curves, charts and text.

#include <cmath>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "program/chart/area.h"
#include "program/chart/axis.h"
#include "program/chart/bars.h"
#include "program/chart/line.h"
#include "program/chart/median.h"
#include "program/chart/tag.h"
#include "program/chart/text.h"
#include "program/chart/thinning.h"

namespace snug::chart::chart_test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kMax = std::numeric_limits<double>::max();

std::string labels_of(const Axis& axis) {
  std::string labels;
  for (const Tick& tick : axis.ticks) {
    labels += (labels.empty() ? "" : " ") + tick.label;
  }
  return labels + (axis.unit.empty() ? "" : " | " + axis.unit);
}

TEST(Axis, PutsTicksAtRoundNumbersAroundTheValues) {
  const Axis axis = make_axis({.low = 1.38, .high = 5.61}, {.about_ticks = 5});
  EXPECT_EQ(labels_of(axis), "1 2 3 4 5 6");
  EXPECT_DOUBLE_EQ(axis.place(2.5), 0.3);
  EXPECT_DOUBLE_EQ(axis.ticks.front().place, 0);
  EXPECT_DOUBLE_EQ(axis.ticks.back().place, 1);
  EXPECT_EQ(labels_of(make_axis({.low = -0.31, .high = 0.42}, {})), "-0.4 -0.2 0 0.2 0.4 0.6");
}

TEST(Axis, CountsSmallAndLargeNumbersInACommonPower) {
  EXPECT_EQ(labels_of(make_axis({.low = 3e-5, .high = 3e-4}, {.from_zero = true})), "0 1 2 3 | ×10⁻⁴");
  EXPECT_EQ(labels_of(make_axis({.low = 0, .high = 2.5e7}, {})), "0 0.5 1.0 1.5 2.0 2.5 | ×10⁷");
}

TEST(Axis, CountsBytesInPowersOf1024AndItemsInPowersOf1000) {
  EXPECT_EQ(labels_of(make_axis({.low = 0, .high = 3.0 * (1 << 30)}, {.quantity = Quantity::Bytes})), "0 1 2 3 | GiB");
  EXPECT_EQ(labels_of(make_axis({.low = 0, .high = 360.0 * (1 << 20)}, {.quantity = Quantity::Bytes})),
            "0 100 200 300 400 | MiB");
  EXPECT_EQ(labels_of(make_axis({.low = 0, .high = 48e3}, {.quantity = Quantity::Count})), "0 10k 20k 30k 40k 50k");
  EXPECT_EQ(labels_of(make_axis({.low = 0, .high = 2000}, {.quantity = Quantity::Count})), "0 500 1,000 1,500 2,000");
}

TEST(Axis, ShowsNoFractionsOfAStep) {
  EXPECT_EQ(labels_of(make_axis({.low = 1, .high = 1}, {.quantity = Quantity::Count, .tight = true})), "1");
  EXPECT_EQ(labels_of(make_axis({.low = 1, .high = 3}, {.quantity = Quantity::Count, .tight = true})), "1 2 3");
}

TEST(Axis, UsesPowersOfTheBaseWhenLogarithmic) {
  const Axis scale = make_axis({.low = 8192, .high = 65536}, {.log_base = 2});
  EXPECT_EQ(labels_of(scale), "8,192 16,384 32,768 65,536");
  EXPECT_NEAR(scale.place(16384), 1.0 / 3, 1e-12);
  EXPECT_EQ(labels_of(make_axis({.low = 65536, .high = 65536}, {.log_base = 2})), "32,768 65,536 131,072");
  EXPECT_EQ(labels_of(make_axis({.low = 0.02, .high = 5e8}, {.log_base = 10})), "10⁻² 10¹ 10⁴ 10⁷");
}

TEST(Axis, IsLinearWhenAValueHasNoLogarithm) {
  EXPECT_EQ(make_axis({.low = 0, .high = 100}, {.log_base = 10}).log_base, 0);
  EXPECT_EQ(make_axis({.low = -1, .high = 100}, {.log_base = 10}).log_base, 0);
}

TEST(Axis, MakesRoomAroundASingleValue) {
  for (const double value : {0.0, 1.0, -3.0, 1e-300, 5e-324, 1e17, kMax, -kMax}) {
    Extent extent;
    extent.add(value);
    const Axis axis = make_axis(extent, {});
    EXPECT_LT(axis.low, axis.high) << value;
    EXPECT_GE(axis.ticks.size(), 2u) << value;
  }
}

TEST(Axis, StaysSaneForEveryPairOfDoubles) {
  const double values[] = {-kMax, -1e200,      -1.0, -1e-300,  -5e-324, 0.0,  5e-324, 1e-300, 1e-9,
                           1.0,   1.0 + 1e-15, 1e15, 1e15 + 1, 1e200,   kMax, kNan,   kInf,   -kInf};
  for (const double a : values) {
    for (const double b : values) {
      for (const Quantity quantity : {Quantity::Number, Quantity::Count, Quantity::Bytes}) {
        for (const double log_base : {0.0, 2.0, 10.0}) {
          for (const bool tight : {false, true}) {
            Extent extent;
            extent.add(a);
            extent.add(b);
            const Axis axis = make_axis(extent, {.quantity = quantity, .tight = tight, .log_base = log_base});
            ASSERT_LT(axis.low, axis.high) << a << " " << b;
            ASSERT_LE(axis.ticks.size(), 50u) << a << " " << b;
            for (const Tick& tick : axis.ticks) {
              ASSERT_TRUE(tick.place >= 0 && tick.place <= 1) << a << " " << b;
              ASSERT_LT(tick.label.size(), 40u) << a << " " << b;
            }
            for (const double value : {a, b}) {
              if (std::isfinite(value)) {
                ASSERT_TRUE(axis.place(value) >= 0 && axis.place(value) <= 1) << a << " " << b;
              }
            }
          }
        }
      }
    }
  }
}

TEST(Thinning, KeepsAllPointsOfAShortCurve) {
  const std::vector<Point> points{{1, 5}, {2, 3}, {3, kNan}, {4, 8}};
  EXPECT_EQ(thinned(points, 100), (std::vector<size_t>{0, 1, 2, 3}));
  EXPECT_TRUE(thinned({}, 100).empty());
  EXPECT_TRUE(thinned(points, 0).empty());
}

TEST(Thinning, KeepsFirstLowestHighestLastAndABreakOfEachColumn) {
  std::vector<Point> points(100);
  for (size_t i = 0; i < points.size(); ++i) {
    points[i] = {static_cast<double>(i), 0};
  }
  points[17].y = -4;
  points[33].y = 9;
  points[34].y = kInf;
  points[35].y = -kInf;
  EXPECT_EQ(thinned(points, 1), (std::vector<size_t>{0, 17, 33, 34, 99}));
}

TEST(Thinning, KeepsOnlyABreakWhereNothingIsFinite) {
  const std::vector<Point> points(50, Point{1, kNan});
  EXPECT_EQ(thinned(points, 10), (std::vector<size_t>{0, 49}));
}

TEST(Thinning, NeverKeepsMoreThanFivePerColumn) {
  std::vector<Point> points;
  for (int i = 0; i < 100'000; ++i) {
    points.push_back({static_cast<double>(i), std::sin(i * 0.7) * i});
  }
  const auto kept = thinned(points, 300);
  EXPECT_LE(kept.size(), 1500u);
  EXPECT_GE(kept.size(), 900u);
  EXPECT_TRUE(std::is_sorted(kept.begin(), kept.end()));
}

TEST(Thinning, KeepsTheHighestStackOfEachColumn) {
  std::vector<Point> points;
  for (int i = 0; i < 1000; ++i) {
    points.push_back({static_cast<double>(i), i == 555 ? 7.0 : 1.0});
  }
  const auto kept = thinned_to_highest(points, 10);
  EXPECT_EQ(kept.size(), 11u);
  EXPECT_NE(std::find(kept.begin(), kept.end(), 555u), kept.end());
  EXPECT_EQ(kept.back(), 999u);
}

TEST(HtmlText, EscapesMarkupAndQuotes) {
  EXPECT_EQ(escape_html("<a href='x' b=\"y\">&"), "&lt;a href=&#39;x&#39; b=&quot;y&quot;&gt;&amp;");
  EXPECT_EQ(escape_html("line\n\ttab"), "line\n\ttab");
  EXPECT_EQ(escape_html("grüße 漢字 🧸"), "grüße 漢字 🧸");
}

TEST(HtmlText, ReplacesWhatIsNoUtf8AndControlCharacters) {
  EXPECT_EQ(escape_html("a\xff"
                        "b"),
            "a\uFFFDb");
  EXPECT_EQ(escape_html("\xc3"), "\uFFFD");                      // cut off
  EXPECT_EQ(escape_html("\xc0\xaf"), "\uFFFD\uFFFD");            // overlong "/"
  EXPECT_EQ(escape_html("\xed\xa0\x80"), "\uFFFD\uFFFD\uFFFD");  // a surrogate
  EXPECT_EQ(escape_html("\xf4\x90\x80\x80"), "\uFFFD\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(escape_html("\xe6\xbc<"), "\uFFFD\uFFFD&lt;");
  EXPECT_EQ(escape_html(std::string_view("\0\x1b\x7f\r", 4)), "\uFFFD\uFFFD\uFFFD\uFFFD");
}

TEST(HtmlText, WritesNumbersForPeople) {
  EXPECT_EQ(grouped(0), "0");
  EXPECT_EQ(grouped(-1234567), "-1,234,567");
  EXPECT_EQ(grouped(999), "999");
  EXPECT_EQ(grouped(std::numeric_limits<int64_t>::min()), "-9,223,372,036,854,775,808");
  EXPECT_EQ(rounded(1.43249), "1.432");
  EXPECT_EQ(rounded(65536), "65,536");
  EXPECT_EQ(rounded(kNan), "NaN");
  EXPECT_EQ(rounded(-kInf), "−∞");
  EXPECT_EQ(prefixed(640), "640");
  EXPECT_EQ(prefixed(999.6), "1.00 k");
  EXPECT_EQ(prefixed(32.8e6), "32.8 M");
  EXPECT_EQ(prefixed(1e300), "1e+300");
  EXPECT_EQ(byte_text(-5), "0 B");
  EXPECT_EQ(byte_text(std::numeric_limits<int64_t>::max()), "8.00 EiB");
  EXPECT_EQ(duration(0.25), "0.25 s");
  EXPECT_EQ(duration(59.7), "1 min 0 s");
  EXPECT_EQ(duration(200), "3 min 20 s");
  EXPECT_EQ(duration(7500), "2 h 5 min");
  EXPECT_EQ(duration(kInf), "∞ s");
  EXPECT_EQ(superscript(-12), "⁻¹²");
}

TEST(LineChart, BreaksTheLineAndSetsAMarkWhereAValueIsNotFinite) {
  const std::string html = line_chart(
      {.title = "Loss",
       .series = {{.name = "training", .look = "training", .points = {{0, 0}, {1, 1}, {2, kNan}, {3, 1}, {4, 0}}}}});
  EXPECT_NE(html.find("d=\"M0.0 1000.0h0L250.0 0.0M750.0 0.0h0L1000.0 1000.0\""), std::string::npos) << html;
  EXPECT_NE(html.find("NaN or infinite (1)"), std::string::npos);
  EXPECT_NE(html.find("d=\"M500.0 1000v-60\""), std::string::npos) << html;
}

TEST(LineChart, HoldsAValueUntilTheNextWhenItGoesInSteps) {
  const Series series{.name = "scale", .look = "loss-scale", .points = {{0, 0}, {5, 1}, {10, 0}}, .steps = true};
  const std::string html = line_chart({.title = "Loss scale", .series = {series}});
  EXPECT_NE(html.find("M0.0 1000.0h0L500.0 1000.0L500.0 0.0L1000.0 0.0L1000.0 1000.0\""), std::string::npos) << html;
}

TEST(AreaChart, StacksTheLayersInOrder) {
  const std::string html = area_chart(
      {.title = "Memory", .x = {0, 10}, .layers = {{"low", "parameters", {1, 1}}, {"high", "other", {1, 3}}}});
  // 4 at the end, of which 1 is the lower layer; the higher one is drawn first, down to the ground.
  const size_t high = html.find("<path class=\"area other\" d=\"M0.0 1000.0L0.0 500.0L0.0 500.0L1000.0 0.0");
  const size_t low = html.find("<path class=\"area parameters\" d=\"M0.0 1000.0L0.0 750.0L0.0 750.0L1000.0 750.0");
  EXPECT_LT(high, low) << html;
  EXPECT_NE(low, std::string::npos) << html;
}

TEST(AreaChart, FillsThePlotForASingleStepAndCountsNonsenseAsZero) {
  const std::string html =
      area_chart({.title = "Memory", .x = {3}, .layers = {{"a", "other", {2}}, {"b", "other", {-1}}}});
  EXPECT_NE(html.find("d=\"M0.0 1000.0L0.0 0.0L500.0 0.0L1000.0 0.0L1000.0 1000.0Z\""), std::string::npos) << html;
  EXPECT_EQ(area_chart({.title = "m", .x = {1, 2}, .layers = {{"a", "other", {kNan, kInf}}}}).find("nan"),
            std::string::npos);
}

TEST(Tag, EscapesValuesLeavesOutEmptyOnesAndShortensNumbers) {
  EXPECT_EQ(tag("rect", {{"class", "a \"b\""}, {"d", ""}, {"x", 12.5}, {"y", 3}, {"z", -0.001}}),
            "<rect class=\"a &quot;b&quot;\" x=\"12.5\" y=\"3\" z=\"0\"/>");
  EXPECT_EQ(tag("td", {}, ""), "<td></td>");
  EXPECT_EQ(tag("p", {{"class", "c"}}, "<b>1</b>"), "<p class=\"c\"><b>1</b></p>");
  EXPECT_EQ(short_number(1000), "1000");
  EXPECT_EQ(short_number(0.456), "0.46");
}

TEST(LineChart, IsTheSameCurveInAnImageOfFixedSizeWithTextInIt) {
  const LineChart chart{.title = "Loss <1>",
                        .series = {{.name = "training", .look = "training", .points = {{0, 0}, {1, 2}, {2, 1}}}},
                        .made = "By hand, in words that take more than one line of an image that is so narrow."};
  const std::string image = line_chart(chart, Medium::Image);
  EXPECT_NE(image.find("<path class=\"line training\" d=\"M0.0 190.0h0L223.0 0.0L446.0 95.0\"/>"), std::string::npos)
      << image;
  for (const char* part : {"<title>Loss &lt;1&gt;</title>", ">training</text>", ">optimizer step</text>",
                           ">By hand, in words", "narrow.</text>", "viewBox=\"0 0 540 "}) {
    EXPECT_NE(image.find(part), std::string::npos) << part << "\n" << image;
  }
}

TEST(LineChart, HasARowUnderThePointerForEachPlaceWithPoints) {
  const Series line{.name = "a", .look = "series-0", .points = {{1, 5}, {1.001, 6}, {100, 7}}};
  const Series points{
      .name = "b", .look = "series-1", .points = {{1, 8}, {1, 9}}, .drawn = Drawn::Points, .labels = {"one", ""}};
  const std::string html = line_chart({.title = "t", .series = {line, points}, .x_title = "width", .x = AxisOptions()});
  EXPECT_NE(html.find("width 1.001\\na  6\\nb, one  8\\nb  9"), std::string::npos) << html;
  EXPECT_NE(html.find("width 100\\na  7&quot;]"), std::string::npos) << html;
}

TEST(BarChart, DrawsPartsInProportionOnAPageAndInAnImage) {
  const BarChart chart{.title = "Bytes",
                       .parts = {{"p", "series-1"}, {"q", "series-2"}},
                       .bars = {{"one", {30, 70}}, {"two", {kNan, 25}}}};
  for (const Medium medium : {Medium::Page, Medium::Image}) {
    std::string drawn = bar_chart(chart, medium);
    std::vector<double> widths;
    for (size_t at = drawn.find("<rect class=\"area"); at != std::string::npos;
         at = drawn.find("<rect class=\"area", at + 1)) {
      widths.push_back(std::stod(drawn.substr(drawn.find("width=\"", at) + 7)));
    }
    ASSERT_EQ(widths.size(), 4u) << drawn;
    const double whole = widths[0] + widths[1];
    EXPECT_NEAR(widths[0] / whole, 0.3, 1e-4);
    EXPECT_EQ(widths[2], 0);
    EXPECT_NEAR(widths[3] / whole, 0.25, 1e-4);
  }
}

TEST(Median, TakesTheMiddleOfTheFiniteValues) {
  EXPECT_EQ(median({5, 1, 3}), 3);
  EXPECT_EQ(median({4, 1, 3, 2}), 2.5);
  EXPECT_EQ(median({kNan, 7, kInf}), 7);
  EXPECT_EQ(median({kMax, kMax}), kMax);
  EXPECT_TRUE(std::isnan(median({})));
}

TEST(LineChart, ABareLineHasNoDotsHoweverFewItsPointsAre) {
  const auto drawn = [](Drawn how) {
    return line_chart({.title = "t", .series = {{.look = "series-0", .points = {{1, 8}, {2, 9}}, .drawn = how}}},
                      Medium::Image);
  };
  EXPECT_GT(drawn(Drawn::Line).size(), drawn(Drawn::BareLine).size());
  EXPECT_EQ(drawn(Drawn::Line), drawn(Drawn::LineAndPoints));
}

}  // namespace
}  // namespace snug::chart::chart_test
