#include "program/report/gradient_map.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>

#include <fmt/format.h>

#include "program/chart/tag.h"
#include "program/chart/text.h"

namespace snug::detail {
namespace {

using chart::tag;

constexpr int kFp16Smallest = -24;  // the exponent of FP16's smallest subnormal number

struct Row {
  std::string parameter;
  int64_t elements = 0, zeros = 0, non_finite = 0, lowest = 0;
  std::vector<int64_t> counts;
  std::optional<double> lost_updates;
};

template <class T>
std::optional<T> detail_of(const RunEvent& event, std::string_view name) {
  for (const auto& [key, value] : event.details) {
    if (key == name && std::holds_alternative<T>(value)) {
      return std::get<T>(value);
    }
  }
  return std::nullopt;
}

std::optional<Row> row_of(const RunEvent& event) {
  const auto parameter = detail_of<std::string>(event, "parameter");
  const auto exponents = detail_of<std::string>(event, "exponents");
  const auto elements = detail_of<int64_t>(event, "elements");
  if (!parameter || !exponents || !elements || *elements < 1) {
    return std::nullopt;
  }
  Row row{.parameter = *parameter,
          .elements = *elements,
          .zeros = detail_of<int64_t>(event, "zeros").value_or(0),
          .non_finite = detail_of<int64_t>(event, "non_finite").value_or(0),
          .lowest = detail_of<int64_t>(event, "lowest_exponent").value_or(0),
          .counts = {},
          .lost_updates = detail_of<double>(event, "lost_updates")};
  std::istringstream stream(*exponents);
  for (int64_t count = 0; stream >> count;) {
    row.counts.push_back(count);
  }
  return row.counts.empty() ? std::nullopt : std::optional(row);
}

std::string percent(int64_t part, int64_t whole) {
  return part == 0 ? "–" : fmt::format("{:.3g} %", 100.0 * static_cast<double>(part) / static_cast<double>(whole));
}

// Cells darken with the logarithm of their share: from a ten-thousandth to all of the elements.
std::string cells(const Row& row) {
  std::string svg;
  for (size_t i = 0; i < row.counts.size(); ++i) {
    const double share = static_cast<double>(row.counts[i]) / static_cast<double>(row.elements);
    const double strength = share > 0 ? std::clamp(1 + std::log10(share) / 4, 0.06, 1.0) : 0;
    if (strength > 0) {
      svg += tag("rect", {{"x", i}, {"width", 1.02}, {"height", 1}, {"opacity", strength}});
    }
  }
  return svg;
}

std::string mark(double exponent, const Row& row, std::string_view look) {
  const double x = exponent - static_cast<double>(row.lowest);
  if (x <= 0 || x >= static_cast<double>(row.counts.size())) {
    return "";
  }
  return tag("path", {{"class", look}, {"d", fmt::format("M{:.2f} 0V1", x)}});
}

// `scaled`: the exponent at which FP16 ends with the loss scale; empty if the loss is not scaled.
std::string table_row(const Row& row, std::optional<double> scaled) {
  const std::string marks = mark(kFp16Smallest, row, "fp16") + (scaled ? mark(*scaled, row, "fp16 scaled") : "");
  const std::string drawn = tag("svg",
                                {{"viewBox", fmt::format("0 0 {} 1", row.counts.size())},
                                 {"preserveAspectRatio", "none"},
                                 {"aria-hidden", "true"}},
                                cells(row) + marks);
  return tag("tr", {},
             tag("th", {}, chart::escape_html(row.parameter)) + tag("td", {{"class", "cells"}}, drawn) +
                 tag("td", {}, percent(row.zeros, row.elements)) +
                 tag("td", {}, row.non_finite == 0 ? "–" : chart::grouped(row.non_finite)) +
                 tag("td", {}, row.lost_updates ? fmt::format("{:.3g} %", 100 * *row.lost_updates) : "–")) +
         "\n";
}

std::string power_of_two(int64_t exponent) { return "2" + chart::superscript(static_cast<int>(exponent)); }

std::string caption_of(const Row& row, double loss_scale, bool has_updates) {
  const int64_t highest = row.lowest + static_cast<int64_t>(row.counts.size()) - 1;
  return fmt::format(
      "Each row is a parameter, from {} on the left to {} on the right; the darker, the more of its gradients are of "
      "that size. The line is where FP16 ends, at {}: gradients to its left would become zero{}.{}",
      power_of_two(row.lowest), power_of_two(highest), power_of_two(kFp16Smallest),
      loss_scale > 1 ? fmt::format(". With the loss scaled by {}, it is the dashed one", chart::rounded(loss_scale))
                     : "",
      has_updates ? " Lost are the updates that were too small to move a 16-bit weight." : "");
}

}  // namespace

int64_t last_gradient_sample(const std::vector<RunEvent>& events) {
  int64_t last = 0;
  for (const RunEvent& event : events) {
    last = event.name == kGradientsEvent ? std::max(last, event.step) : last;
  }
  return last;
}

std::string gradient_map(const std::vector<RunEvent>& events, double loss_scale) {
  const int64_t last = last_gradient_sample(events);
  std::vector<Row> rows;
  for (const RunEvent& event : events) {
    const auto row = event.name == kGradientsEvent && event.step == last ? row_of(event) : std::nullopt;
    if (row) {
      rows.push_back(*row);
    }
  }
  if (rows.empty()) {
    return "";
  }
  std::optional<double> scaled;
  if (std::isfinite(loss_scale) && loss_scale > 1) {
    scaled = kFp16Smallest - std::log2(loss_scale);
  }
  std::string body = tag("tr", {}, "<th></th><td></td><td>zero</td><td>not finite</td><td>lost</td>") + "\n";
  for (const Row& row : rows) {
    body += table_row(row, scaled);
  }
  const bool has_updates = std::any_of(rows.begin(), rows.end(), [](const Row& row) { return row.lost_updates; });
  const std::string caption = tag("p", {{"class", "caption"}}, caption_of(rows.back(), loss_scale, has_updates));
  return tag("h2", {}, "Sizes of gradients at step " + chart::grouped(last)) + "\n" +
         tag("div", {{"class", "box"}}, caption + "\n" + tag("table", {{"class", "gradients-map"}}, "\n" + body)) +
         "\n";
}

}  // namespace snug::detail
