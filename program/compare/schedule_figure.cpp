#include "program/compare/schedule_figure.h"

// The schedule of forward and backward as a picture. Colours go with shapes: full squares run forward, squares with a
// hole run again, discs go backward. figure.css has the looks.

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "program/chart/tag.h"

namespace snug::cli {
namespace {

using chart::moved;
using chart::svg_text;
using chart::tag;

constexpr double kWidth = 1060, kPanelWidth = 520, kPanelHeight = 272;  // two panels in a row
constexpr double kLeft = 66, kSide = 440;                               // of the drawing in a panel
constexpr double kTimeline = 104, kTimelineHeight = 132;
constexpr double kLegendHeight = 30;

std::string box(double x, double y, double width, double height, std::string_view look) {
  return tag("rect", {{"x", x}, {"y", y}, {"width", width}, {"height", height}, {"rx", 2}, {"class", look}}) + "\n";
}

// A run as a mark of at most `size` around its centre.
std::string mark(BlockRun::What what, double x, double y, double size) {
  if (what == BlockRun::What::Backward) {
    return tag("circle", {{"cx", x}, {"cy", y}, {"r", size / 2}, {"class", "back"}}) + "\n";
  }
  const auto square = [&](double side, const char* look) { return box(x - side / 2, y - side / 2, side, side, look); };
  return what == BlockRun::What::Forward ? square(size, "first") : square(size, "again") + square(size * 0.4, "hole");
}

// The results that forward leaves in memory, block by block; and below, the results that backward makes again.
std::string rows(const Schedule& schedule, const Schedule::Way& way) {
  std::string svg = svg_text(kLeft - 10, 61, "soft end", "forward") + svg_text(kLeft - 10, 86, "soft end", "backward");
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
    svg += svg_text(middle, 61, is_kept ? "on middle" : "soft middle", fmt::format("{}", block));
    svg += box(x, 72, width, 20, again == 0 ? "backward" : "more");
    svg += again == 0 ? "" : svg_text(middle, 86, "middle", fmt::format("+{}", again));
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
         svg_text(kLeft - 10, y_of(schedule.blocks) + 10, "soft end", fmt::format("block {}", schedule.blocks)) +
         svg_text(kLeft - 10, y_of(1) + 10, "soft end", "block 1") +
         box(kLeft, kTimeline + kTimelineHeight + 2, kSide, 0.8, "rule") +
         svg_text(kLeft + kSide, kTimeline + kTimelineHeight + 16, "soft end", "time, a column for each run");
}

std::string panel(const Schedule& schedule, const Schedule::Way& way, int64_t runs) {
  const std::string told =
      fmt::format("at most {} results in memory, {} runs again", way.most_kept(), way.runs_again());
  return svg_text(0, 16, "name", way.name) + svg_text(0, 35, "soft", told) + rows(schedule, way) +
         timeline(schedule, way, runs);
}

std::string legend() {
  using What = BlockRun::What;
  double x = 0;
  std::string svg;
  const auto key = [&](const std::string& drawing, std::string_view words) {
    svg += moved(x, 0, drawing + svg_text(24, 11, "soft", words));
    x += 46 + 6.1 * static_cast<double>(words.size());
  };
  key(box(0, 0, 18, 14, "kept"), "kept by forward");
  key(box(0, 0, 18, 14, "dropped"), "dropped");
  key(box(0, 0, 18, 14, "more") + svg_text(9, 11, "middle", "+1"), "run again so often");
  key(box(0, 2, 18, 10, "band"), "result in memory");
  key(mark(What::Forward, 9, 7, 11), "forward");
  key(mark(What::Again, 9, 7, 11), "forward again");
  key(mark(What::Backward, 9, 7, 11), "backward");
  return svg;
}

}  // namespace

std::string schedule_figure(const Exhibit& exhibit, const Schedule& schedule, chart::Medium medium) {
  constexpr double kMargin = 8, kImageWidth = kWidth + 2 * kMargin;
  size_t runs = 0;
  for (const Schedule::Way& way : schedule.ways) {
    runs = std::max(runs, way.runs.size());
  }
  std::string panels;
  for (size_t i = 0; i < schedule.ways.size(); ++i) {
    const double x = static_cast<double>(i % 2) * (kWidth - kPanelWidth);
    const double y = static_cast<double>(i / 2) * kPanelHeight;
    panels += moved(x, y, panel(schedule, schedule.ways[i], static_cast<int64_t>(runs)));
  }
  const double panels_height = static_cast<double>((schedule.ways.size() + 1) / 2) * kPanelHeight;
  const double height = panels_height + kLegendHeight + kMargin;
  const std::string drawing = moved(kMargin, kMargin / 2, panels + moved(kLeft, panels_height + 6, legend()));
  if (medium == chart::Medium::Image) {
    return chart::image(exhibit.title, drawing, kImageWidth, height);
  }
  const std::string svg = tag("svg",
                              {{"class", "schedule"},
                               {"viewBox", fmt::format("0 0 {} {}", kImageWidth, height)},
                               {"role", "img"},
                               {"aria-label", exhibit.title}},
                              drawing);
  return chart::page_figure({.title = exhibit.title,
                             .caption = exhibit.caption,
                             .made = exhibit.made,
                             .numbers = exhibit.file + ".csv",
                             .wide = true},
                            tag("div", {{"class", "scroll"}}, svg) + "\n");
}

}  // namespace snug::cli
