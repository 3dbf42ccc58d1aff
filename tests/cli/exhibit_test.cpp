// Exhibits: what is drawn is what the CSV says, and the page loads nothing.

#include "program/compare/exhibit.h"

#include <cmath>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "program/compare/comparison_page.h"
#include "program/compare/exhibit_figures.h"

namespace snug::cli::exhibit_test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
    ++count;
  }
  return count;
}

Exhibit plot_of(std::vector<Curve> curves, PlotAxis x = {.title = "x", .from_zero = true},
                PlotAxis y = {.title = "y", .from_zero = true}) {
  return {.file = "data",
          .title = "Title",
          .made = "By hand.",
          .content = Plot{.x = x, .y = y, .curves = std::move(curves)}};
}

TEST(Exhibit, WritesCurvesAsCsvThatReadsBackBitForBit) {
  const double third = 1.0 / 3;
  const Exhibit exhibit =
      plot_of({{.name = "a, b", .x = {0, third}, .y = {1e-300, kNan}, .labels = {"", "say \"hi\""}}});
  EXPECT_EQ(exhibit_csv(exhibit, "cpu"),
            "curve,x,y,label,device\n\"a, b\",0,1e-300,,cpu\n"
            "\"a, b\",0.3333333333333333,nan,\"say \"\"hi\"\"\",cpu\n");
  EXPECT_EQ(std::stod("0.3333333333333333"), third);
}

TEST(Exhibit, WritesBarsAndTablesAsCsv) {
  const Exhibit bars{.file = "b", .title = "", .content = Bars{.parts = {"p", "q"}, .bars = {{"one", {1, 2}, "n"}}}};
  EXPECT_EQ(exhibit_csv(bars, "cpu"), "bar,p,q,note,device\none,1,2,n,cpu\n");
  const Exhibit table{.file = "t", .title = "", .content = Table{.header = {"a", "b"}, .rows = {{"1", "2\n3"}}}};
  EXPECT_EQ(exhibit_csv(table, "cuda:1"), "a,b,device\n1,\"2\n3\",cuda:1\n");
}

TEST(Exhibit, DrawsPointsWhereTheyLieOnItsAxes) {
  const std::string html =
      exhibit_figure(plot_of({{.name = "a", .x = {0, 5, 10}, .y = {0, 10, 5}, .drawn = Drawn::Points}}));
  EXPECT_NE(html.find("M0.0 1000.0h0M500.0 0.0h0M1000.0 500.0h0"), std::string::npos) << html;
  const std::string log =
      exhibit_figure(plot_of({{.name = "a", .x = {16, 64, 256}, .y = {1, 100, 10}, .drawn = Drawn::Points}},
                             {.log_base = 2}, {.log_base = 10}));
  EXPECT_NE(log.find("M0.0 1000.0h0M500.0 0.0h0M1000.0 500.0h0"), std::string::npos) << log;
}

TEST(Exhibit, BreaksLinesWhereAValueIsNotFinite) {
  const std::string html = exhibit_figure(plot_of({{.name = "a", .x = {0, 1, 2, 3, 4}, .y = {0, 1, kNan, 1, 0}}}));
  const size_t begin = html.find("class=\"line series-0\" d=\"");
  ASSERT_NE(begin, std::string::npos);
  const std::string path = html.substr(begin, html.find('>', begin) - begin);
  EXPECT_EQ(count_of(path, "M"), 2u) << path;
}

TEST(Exhibit, PutsNoLabelOverAnother) {
  const auto labels = [](std::vector<double> x, std::vector<std::string> texts) {
    const std::vector<double> y(x.size(), 5);
    return exhibit_figure(
        plot_of({{.name = "a", .x = std::move(x), .y = y, .drawn = Drawn::Points, .labels = std::move(texts)}}));
  };
  const std::string apart = labels({1, 9}, {"left", "right"});
  EXPECT_EQ(count_of(apart, "class=\"tag"), 2u);
  const std::string together = labels({5, 5, 10}, {"one", "two", ""});
  EXPECT_EQ(count_of(together, "class=\"tag"), 2u);  // at different sides of the point
  EXPECT_NE(together.find("translate(0%,50%)"), std::string::npos);
  EXPECT_NE(together.find("translate(-100%,50%)"), std::string::npos);
  const std::string crowd = labels(std::vector<double>(12, 5.0), std::vector<std::string>(12, "a label"));
  EXPECT_LT(count_of(crowd, "class=\"tag"), 12u);
}

TEST(Exhibit, DrawsBarsInProportion) {
  const std::string html = exhibit_figure({.file = "b",
                                           .title = "",
                                           .content = Bars{.quantity = Quantity::Bytes,
                                                           .parts = {"activations", "other part"},
                                                           .bars = {{"one", {30, 70}}, {"two", {-5, 25}}}}});
  EXPECT_NE(html.find("class=\"area activations\" x=\"0\" width=\"300\""), std::string::npos) << html;
  EXPECT_NE(html.find("class=\"area series-1\" x=\"300\" width=\"700\""), std::string::npos);
  EXPECT_NE(html.find("class=\"area series-1\" x=\"0\" width=\"250\""), std::string::npos);
  EXPECT_NE(html.find("<td>100"), std::string::npos);
}

// Two blocks, of which the first one's result is dropped and made again.
Exhibit small_schedule() {
  using What = BlockRun::What;
  return {.file = "s",
          .title = "<Title>",
          .content = Schedule{.blocks = 2,
                              .ways = {{"frugal, <by hand>",
                                        {{What::Forward, 1, 2},
                                         {What::Forward, 2, 3, true},
                                         {What::Backward, 2},
                                         {What::Again, 1, 5},
                                         {What::Backward, 1}}}}}};
}

TEST(Exhibit, WritesASchedulesRunsAsCsv) {
  EXPECT_EQ(exhibit_csv(small_schedule(), "cpu"),
            "way,time,run,block,kept until,kept by forward,device\n"
            "\"frugal, <by hand>\",0,forward,1,2,0,cpu\n\"frugal, <by hand>\",1,forward,2,3,1,cpu\n"
            "\"frugal, <by hand>\",2,backward,2,,,cpu\n\"frugal, <by hand>\",3,again,1,5,0,cpu\n"
            "\"frugal, <by hand>\",4,backward,1,,,cpu\n");
}

TEST(Schedule, CountsWhatIsInMemoryAndWhatRunsAgain) {
  const Exhibit exhibit = small_schedule();
  const Schedule::Way& way = std::get<Schedule>(exhibit.content).ways.front();
  EXPECT_EQ(way.runs_again(), 1);
  EXPECT_EQ(way.most_kept(), 2);  // both, while the second runs forward
}

TEST(Exhibit, DrawsTheRunsOfASchedule) {
  const std::string svg = exhibit_svg(small_schedule());
  const std::string drawn = svg.substr(0, svg.find("<g transform=\"translate(66"));  // without the legend
  EXPECT_EQ(count_of(drawn, "class=\"kept\""), 1u) << drawn;
  EXPECT_EQ(count_of(drawn, "class=\"dropped\""), 1u);
  EXPECT_EQ(count_of(drawn, "class=\"first\""), 2u);
  EXPECT_EQ(count_of(drawn, "class=\"again\""), 1u);
  EXPECT_EQ(count_of(drawn, "class=\"back\""), 2u);
  EXPECT_EQ(count_of(drawn, "class=\"band\""), 3u);
  EXPECT_EQ(count_of(drawn, ">+1<"), 1u);
}

TEST(Exhibit, DrawsPlotsAndBarsAsImagesToo) {
  const Exhibit plot = plot_of({{.name = "<a>", .x = {0, 5, 10}, .y = {0, 10, 5}, .drawn = Drawn::Points}});
  const std::string image = exhibit_svg(plot);
  EXPECT_NE(image.find("M0.0 300.0h0M483.0 0.0h0M966.0 150.0h0"), std::string::npos) << image;
  for (const char* part : {"<title>Title</title>", ">By hand.</text>", ">&lt;a&gt;</text>", ">10</text>"}) {
    EXPECT_NE(image.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(count_of(image, "<svg "), 1u);
  for (const char* of_pages : {"href", "data-hover", "max-width: 760px", "https:", "@import", "url(", "<a>",
                               "foreignObject", "<span", "<div", "var("}) {
    EXPECT_EQ(image.find(of_pages), std::string::npos) << of_pages;
  }
  const std::string bars = exhibit_svg(
      {.file = "b", .title = "", .content = Bars{.parts = {"p"}, .bars = {{"one", {2}, "note"}, {"two", {1}}}}});
  EXPECT_NE(bars.find("<rect class=\"area series-2\" x=\"0\""), std::string::npos) << bars;
  EXPECT_NE(bars.find(">note</text>"), std::string::npos);
  EXPECT_EQ(exhibit_svg({.file = "t", .title = "", .content = Table{.header = {"a"}, .rows = {{"1"}}}}), "");
}

TEST(Exhibit, DrawsAScheduleThatStandsByItselfAndLoadsNothing) {
  std::string svg = exhibit_svg(small_schedule());
  const std::string name_space = "xmlns=\"http://www.w3.org/2000/svg\"";
  ASSERT_NE(svg.find(name_space), std::string::npos);
  svg.erase(svg.find(name_space), name_space.size());
  for (const char* outside : {"http:", "https:", "href", "@import", "url(", "<Title>", "<by hand>"}) {
    EXPECT_EQ(svg.find(outside), std::string::npos) << outside;
  }
  EXPECT_NE(svg.find("prefers-color-scheme: dark"), std::string::npos);
  EXPECT_EQ(exhibit_figure(small_schedule()).find("http:"), std::string::npos);
}

TEST(Exhibit, HasAFigureForNoData) {
  for (const auto& exhibit : {plot_of({}), Exhibit{.file = "b", .title = "", .content = Bars{}},
                              Exhibit{.file = "t", .title = "", .content = Table{}},
                              Exhibit{.file = "s", .title = "", .content = Schedule{}}}) {
    EXPECT_NE(exhibit_figure(exhibit).find("</figure>"), std::string::npos);
  }
}

TEST(ComparisonPage, LoadsNothingAndEscapesWhatItIsGiven) {
  Section section{
      .name = "one", .title = "<One>", .idea = "a & b", .numbers = {{"label", "3.1 s"}}, .findings = {"<f>"}};
  section.exhibits = {plot_of({{.name = "<curve>", .x = {1, 2}, .y = {1, 2}, .labels = {"<l>", ""}}})};
  const std::string page =
      comparison_page({.title = "<title>", .subtitle = "<machine>", .sections = {section, section}});
  for (const char* raw : {"<One>", "a & b", "<f>", "<curve>", "<l>", "<title>\n", "<machine>",
                          "http:", "https:", "src=", "@import", "url("}) {
    EXPECT_EQ(page.find(raw), std::string::npos) << raw;
  }
  EXPECT_NE(page.find("default-src 'none'"), std::string::npos);
  EXPECT_NE(page.find("prefers-color-scheme: dark"), std::string::npos);
  EXPECT_NE(page.find("href=\"data.csv\""), std::string::npos);
  EXPECT_NE(page.find("<a href=\"#one\">"), std::string::npos);
}

TEST(ComparisonPage, AsMarkdownHoldsFindingsAndTables) {
  Section section{.name = "one", .title = "One", .numbers = {{"label", "3.1 s", "note"}}, .findings = {"Found."}};
  section.exhibits = {
      {.file = "t", .title = "T", .made = "Made.", .content = Table{.header = {"a", "b"}, .rows = {{"1", "2"}}}},
      {.file = "b",
       .title = "B",
       .content = Bars{.quantity = Quantity::Bytes, .parts = {"p"}, .bars = {{"x", {1024}, "n"}}}}};
  const std::string text = comparison_markdown({.title = "Page", .sections = {section}});
  for (const char* part : {"# Page", "## One", "- label: 3.1 s, note", "- Found.", "| a | b |\n|---|---|\n| 1 | 2 |",
                           "Made.", "| x | 1.00 KiB | n |"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
}

}  // namespace
}  // namespace snug::cli::exhibit_test
