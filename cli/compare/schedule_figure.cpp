// The schedule of forward and backward as a picture. It carries its own style, since it is also a file. What differs in colour (Okabe & Ito
// 2008, as in page_style.cpp) differs in shape, too: full squares run forward, squares with a hole run again, discs go backward.

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "cli/compare/exhibit_figures.h"
#include "snug/chart/text.h"

namespace snug::cli {
namespace {

constexpr std::string_view kStyle = R"css(
.schedule { --ground: #ffffff; --ink: #1d2127; --soft: #59616b; --rule: #b9b4a9; --kept: #f2b63c; --band: #fbe5b6;
  --first: #0072b2; --again: #d55e00; --back: #009e73;
  font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", sans-serif;
  display: block; width: 100%; }
@media (prefers-color-scheme: dark) {
  .schedule { --ground: #1b1e23; --ink: #e9e7e2; --soft: #a2a9b3; --rule: #565d68; --kept: #d9971a; --band: #5a4413;
    --first: #56b4e9; --again: #f0824a; --back: #2fbf95; }
}
.schedule .ground { fill: var(--ground); }
.schedule text { fill: var(--ink); }
.schedule .name { font-size: 15px; font-weight: 650; }
.schedule .soft { fill: var(--soft); }
.schedule .end { text-anchor: end; }
.schedule .middle { text-anchor: middle; }
.schedule .on { fill: #1d1500; }
.schedule .kept { fill: var(--kept); }
.schedule .dropped { fill: none; stroke: var(--rule); stroke-dasharray: 3 2; }
.schedule .band { fill: var(--band); }
.schedule .first { fill: var(--first); }
.schedule .again { fill: var(--again); }
.schedule .hole { fill: var(--ground); }
.schedule .back { fill: var(--back); }
.schedule .backward { fill: none; stroke: var(--back); stroke-width: 1.5; }
.schedule .more { fill: none; stroke: var(--again); stroke-width: 1.5; }
)css";

constexpr double kWidth = 1060, kPanelWidth = 520, kPanelHeight = 272;  // two panels in a row
constexpr double kLeft = 66, kSide = 440;                               // of what is drawn in a panel
constexpr double kTimeline = 104, kTimelineHeight = 132;
constexpr double kLegendHeight = 30;

std::string text(double x, double y, std::string_view look, std::string_view words) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" class=\"{}\">{}</text>\n", x, y, look, chart::escape_html(words));
}

std::string box(double x, double y, double width, double height, std::string_view look) {
  return fmt::format("<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" rx=\"2\" class=\"{}\"/>\n", x,
                     y, width, height, look);
}

// A run as a mark of at most `size` around its centre.
std::string mark(BlockRun::What what, double x, double y, double size) {
  if (what == BlockRun::What::Backward) {
    return fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"{:.1f}\" class=\"back\"/>\n", x, y, size / 2);
  }
  const auto square = [&](double side, const char* look) { return box(x - side / 2, y - side / 2, side, side, look); };
  return what == BlockRun::What::Forward ? square(size, "first") : square(size, "again") + square(size * 0.4, "hole");
}

// What forward leaves in memory, block by block; and below what backward makes again.
std::string rows(const Schedule& schedule, const Schedule::Way& way) {
  std::string svg = text(kLeft - 10, 61, "soft end", "forward") + text(kLeft - 10, 86, "soft end", "backward");
  const double step = kSide / static_cast<double>(schedule.blocks), width = step - 4;
  for (int64_t block = 1; block <= schedule.blocks; ++block) {
    bool is_kept = false;
    int64_t again = 0;
    for (const BlockRun& run : way.runs) {
      is_kept = is_kept || (run.block == block && run.is_kept);
      again += run.block == block && run.what == BlockRun::What::Again ? 1 : 0;
    }
    const double x = kLeft + static_cast<double>(block - 1) * step, middle = x + width / 2;
    svg += box(x, 47, width, 20, is_kept ? "kept" : "dropped");
    svg += text(middle, 61, is_kept ? "on middle" : "soft middle", fmt::format("{}", block));
    svg += box(x, 72, width, 20, again == 0 ? "backward" : "more");
    svg += again == 0 ? "" : text(middle, 86, "middle", fmt::format("+{}", again));
  }
  return svg;
}

// Blocks upwards, time to the right; `runs` over the whole width.
std::string timeline(const Schedule& schedule, const Schedule::Way& way, int64_t runs) {
  const double column = kSide / static_cast<double>(std::max<int64_t>(runs, 1));
  const double row = kTimelineHeight / static_cast<double>(schedule.blocks);
  const auto x_of = [&](double time) { return kLeft + time * column; };
  const auto y_of = [&](int64_t block) { return kTimeline + static_cast<double>(schedule.blocks - block) * row; };
  std::string bands, marks;
  for (size_t i = 0; i < way.runs.size(); ++i) {
    const BlockRun& run = way.runs[i];
    const auto time = static_cast<double>(i);
    if (run.what != BlockRun::What::Backward) {
      const double length = (static_cast<double>(run.kept_until) - time) * column;
      bands += box(x_of(time), y_of(run.block) + row * 0.12, length, row * 0.76, "band");
    }
    marks += mark(run.what, x_of(time + 0.5), y_of(run.block) + row / 2, 0.9 * std::min(column, row));
  }
  return bands + marks +
         text(kLeft - 10, y_of(schedule.blocks) + 10, "soft end", fmt::format("block {}", schedule.blocks)) +
         text(kLeft - 10, y_of(1) + 10, "soft end", "block 1") +
         box(kLeft, kTimeline + kTimelineHeight + 2, kSide, 0.8, "soft") +
         text(kLeft + kSide, kTimeline + kTimelineHeight + 16, "soft end", "time, a column for each run");
}

std::string panel(const Schedule& schedule, const Schedule::Way& way, int64_t runs) {
  const std::string told =
      fmt::format("at most {} results in memory, {} runs again", way.most_kept(), way.runs_again());
  return text(0, 16, "name", way.name) + text(0, 35, "soft", told) + rows(schedule, way) +
         timeline(schedule, way, runs);
}

std::string legend() {
  using What = BlockRun::What;
  double x = 0;
  std::string svg;
  const auto key = [&](const std::string& drawing, std::string_view words) {
    svg += fmt::format("<g transform=\"translate({:.1f} 0)\">\n{}{}</g>\n", x, drawing, text(24, 11, "soft", words));
    x += 46 + 6.1 * static_cast<double>(words.size());
  };
  key(box(0, 0, 18, 14, "kept"), "kept by forward");
  key(box(0, 0, 18, 14, "dropped"), "dropped");
  key(box(0, 0, 18, 14, "more") + text(9, 11, "middle", "+1"), "run again so often");
  key(box(0, 2, 18, 10, "band"), "result in memory");
  key(mark(What::Forward, 9, 7, 11), "forward");
  key(mark(What::Again, 9, 7, 11), "forward again");
  key(mark(What::Backward, 9, 7, 11), "backward");
  return svg;
}

}  // namespace

std::string schedule_svg(const Schedule& schedule, std::string_view title, std::string_view attribute) {
  size_t runs = 0;
  for (const Schedule::Way& way : schedule.ways) {
    runs = std::max(runs, way.runs.size());
  }
  std::string panels;
  for (size_t i = 0; i < schedule.ways.size(); ++i) {
    const double x = static_cast<double>(i % 2) * (kWidth - kPanelWidth);
    const double y = static_cast<double>(i / 2) * kPanelHeight;
    panels += fmt::format("<g transform=\"translate({:.0f} {:.0f})\">\n{}</g>\n", x, y,
                          panel(schedule, schedule.ways[i], static_cast<int64_t>(runs)));
  }
  const double height = static_cast<double>((schedule.ways.size() + 1) / 2) * kPanelHeight;
  return fmt::format(
      "<svg {} class=\"schedule\" viewBox=\"-8 -4 {:.0f} {:.0f}\" role=\"img\" aria-label=\"{}\">\n<style>{}</style>\n"
      "<rect x=\"-8\" y=\"-4\" width=\"100%\" height=\"100%\" class=\"ground\"/>\n{}"
      "<g transform=\"translate({:.0f} {:.0f})\">\n{}</g>\n</svg>\n",
      attribute, kWidth + 16, height + kLegendHeight + 8, chart::escape_html(title), kStyle, panels, kLeft, height + 6,
      legend());
}

}  // namespace snug::cli
