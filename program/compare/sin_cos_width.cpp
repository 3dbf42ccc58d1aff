#include "program/compare/sin_cos_width.h"

// The sweep of the sin-cos experiment: where mixed precision begins to pay.

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "program/measure/measure.h"
#include "program/measure/two_tasks.h"

namespace snug::cli {

using namespace measure;

void sweep_two_tasks_width(Section& section, const CompareFlags& flags, int64_t points) {
  const std::vector<int64_t> widths =
      flags.quick ? std::vector<int64_t>{150, 300, 600} : std::vector<int64_t>{150, 300, 600, 1200, 2400};
  const TwoTasksData data = two_tasks_data(std::min<int64_t>(points, flags.quick ? 2000 : 4000), flags.device);
  Table table{.header = {"width", "FP32, ms an epoch", "BF16, ms an epoch", "speedup", "saved, ms an epoch"}};
  Curve speedup{.name = "autocast to BF16", .x = {}, .y = {}, .drawn = Drawn::LineAndPoints};
  std::optional<int64_t> first;
  for (const int64_t width : widths) {
    const Way full = articles_loop("", data, width, std::nullopt);
    const Way low = articles_loop("", data, width, torch::kBFloat16);
    const int64_t epochs = width > 600 ? 1 : 3;
    const auto program = [epochs](const Way& way) {
      return [&way, epochs] { return way.seconds_of_epochs(epochs) / static_cast<double>(epochs); };
    };
    const Turns turns = take_turns({program(low), program(full)}, flags.turns(7));
    const double ratio = turns.ratio(1).median;
    const double saved = turns.seconds(1).median * (1 - 1 / ratio);
    table.rows.push_back({fmt::format("{}", width), fmt::format("{:.1f}", 1e3 * turns.seconds(1).median),
                          fmt::format("{:.1f}", 1e3 * turns.seconds(1).median / ratio), str(turns.ratio(1)),
                          fmt::format("{:.1f}", 1e3 * saved)});
    speedup.x.push_back(static_cast<double>(width));
    speedup.y.push_back(ratio);
    if (!first && ratio > 1) {
      first = width;
    }
  }
  section.findings.push_back(
      first ? fmt::format("On {} points, BF16 autocast begins to pay at width {}, of {} that were tried.",
                          data.x.size(0), *first, widths.size())
            : fmt::format("On {} points, BF16 autocast pays at no width up to {} on this machine.", data.x.size(0),
                          widths.back()));
  const std::string made = fmt::format(
      "{} points, the articles' loop in FP32 and with autocast in turns, an epoch or three at a time; longer runs were "
      "not measured.",
      data.x.size(0));
  section.exhibits.push_back(
      {.file = "sin-cos-width",
       .title = "Where mixed precision begins to pay",
       .caption = "time in FP32 over time in BF16; above 1 it pays",
       .made = made,
       .content = Plot{
           .x = {.title = "width", .log_base = 2},
           .y = {.title = "speedup", .from_zero = true},
           .curves = {speedup, {.name = "no difference", .x = {speedup.x.front(), speedup.x.back()}, .y = {1, 1}}}}});
  section.exhibits.push_back(
      {.file = "sin-cos-width-table", .title = "Width, in numbers", .made = made, .content = table});
}

}  // namespace snug::cli
