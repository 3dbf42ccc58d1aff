#include "program/report/report_charts.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "program/chart/area.h"
#include "program/chart/bars.h"
#include "program/chart/line.h"
#include "program/chart/median.h"
#include "program/chart/text.h"

namespace snug::detail {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// A line of single steps with fewer records is clear enough.
constexpr size_t kRecordsToSmooth = 80;

struct Category {
  const char* name;
  const char* look;
  int64_t MemoryByCategory::* bytes;
};

// From the bottom of the stack up. Memory that stays through the step comes first.
constexpr std::array<Category, 6> kCategories{{
    {"other", "other", &MemoryByCategory::other},
    {"parameters", "parameters", &MemoryByCategory::parameters},
    {"optimizer state", "optimizer-state", &MemoryByCategory::optimizer_state},
    {"gradients", "gradients", &MemoryByCategory::gradients},
    {"activations", "activations", &MemoryByCategory::activations},
    {"workspace", "workspace", &MemoryByCategory::workspace},
}};

template <class ValueOf>
std::vector<chart::Point> points_of(const Records& records, ValueOf value_of) {
  std::vector<chart::Point> points;
  points.reserve(records.size());
  for (const StepRecord& record : records) {
    points.push_back({static_cast<double>(record.step), value_of(record)});
  }
  return points;
}

// Means of the finite values among `window` neighbours, half on either side, at about `places` of the points. A gap if
// most of the neighbours are not finite.
std::vector<chart::Point> smoothed(const std::vector<chart::Point>& points, size_t window, size_t places) {
  std::vector<chart::Point> means;
  const size_t stride = std::max<size_t>(1, points.size() / places);
  for (size_t i = 0; i < points.size(); i += stride) {
    const size_t half = std::min({window / 2, i, points.size() - 1 - i});
    double sum = 0;
    size_t count = 0;
    for (size_t j = i - half; j <= i + half; ++j) {
      if (std::isfinite(points[j].y)) {
        sum += points[j].y;
        ++count;
      }
    }
    means.push_back({points[i].x, count > half ? sum / static_cast<double>(count) : kNan});
  }
  return means;
}

// Single steps, and for many steps also a running mean in front. `name` is needed if a chart has other series.
std::vector<chart::Series> noisy_series(const std::string& name, const std::string& look,
                                        const std::vector<chart::Point>& points) {
  if (points.size() < kRecordsToSmooth) {
    return {{.name = name.empty() ? "each step" : name, .look = look, .points = points}};
  }
  const std::string prefix = name.empty() ? "" : name + ", ";
  const size_t window = points.size() / 40 * 2 + 1;
  return {{.name = prefix + "each step", .look = look + " faint", .points = points},
          {.name = fmt::format("{}mean of {} steps", prefix, window),
           .look = look,
           .points = smoothed(points, window, 400),
           .marks_gaps = false}};
}

// A logarithmic axis, if a few values make all other values look flat on a linear axis.
double log_base_for(const std::vector<chart::Point>& points) {
  std::vector<double> values;
  double highest = 0;
  for (const chart::Point& point : points) {
    if (std::isfinite(point.y)) {
      values.push_back(point.y);
      highest = std::max(highest, point.y);
    }
  }
  return highest > 30 * chart::median(values) ? 10 : 0;
}

}  // namespace

std::string loss_chart(const Records& records) {
  const auto training = points_of(records, [](const StepRecord& r) { return r.loss; });
  std::vector<chart::Point> validation;
  for (const StepRecord& record : records) {
    if (record.validation_loss) {
      validation.push_back({static_cast<double>(record.step), *record.validation_loss});
    }
  }
  chart::LineChart chart{.title = "Loss", .caption = "mean per item", .wide = true};
  chart.series = noisy_series("training", "training", training);
  chart.series.push_back(
      {.name = "validation", .look = "validation", .points = validation, .drawn = chart::Drawn::LineAndPoints});
  chart.y.log_base = log_base_for(training);
  return chart::line_chart(chart);
}

std::string learning_rate_chart(const Records& records) {
  const auto points = points_of(records, [](const StepRecord& r) { return r.learning_rate; });
  return chart::line_chart({.title = "Learning rate",
                            .series = {{.name = "learning rate", .look = "learning-rate", .points = points}},
                            .y = {.from_zero = true}});
}

std::string gradient_norm_chart(const Records& records) {
  const auto points = points_of(records, [](const StepRecord& r) { return r.grad_norm; });
  const double log_base = log_base_for(points);
  return chart::line_chart({.title = "Gradient norm",
                            .caption = "before clipping",
                            .series = noisy_series("", "gradient-norm", points),
                            .y = {.from_zero = true, .log_base = log_base}});
}

std::string gradient_noise_chart(const Records& records) {
  const auto points = points_of(records, [](const StepRecord& r) { return r.gradient_noise_scale.value_or(kNan); });
  if (std::none_of(points.begin(), points.end(), [](const chart::Point& p) { return std::isfinite(p.y); })) {
    return "";
  }
  return chart::line_chart({.title = "Gradient noise scale",
                            .caption = "size of a batch up to which a larger one pays",
                            .series = {{.name = "", .look = "gradient-norm", .points = points, .marks_gaps = false}},
                            .y = {.log_base = log_base_for(points)}});
}

std::string loss_scale_chart(const Records& records) {
  const auto points = points_of(records, [](const StepRecord& r) { return r.loss_scale; });
  chart::Marks skipped{.name = "skipped step", .look = "skipped"};
  for (const StepRecord& record : records) {
    if (!record.stepped) {
      skipped.x.push_back(static_cast<double>(record.step));
    }
  }
  return chart::line_chart({.title = "Loss scale",
                            .series = {{.name = "scale", .look = "loss-scale", .points = points, .steps = true}},
                            .y = {.log_base = 2},
                            .marks = skipped});
}

std::string throughput_chart(const Records& records, const std::string& item) {
  const auto points = points_of(records, [](const StepRecord& r) { return r.items_per_second; });
  return chart::line_chart({.title = "Throughput",
                            .caption = item + " per second",
                            .series = noisy_series("", "throughput", points),
                            .y = {.quantity = chart::Quantity::Count, .from_zero = true}});
}

std::string memory_chart(const Records& records) {
  chart::AreaChart chart{.title = "Memory by category", .caption = "held at the peak of each step"};
  chart.y.quantity = chart::Quantity::Bytes;
  for (const StepRecord& record : records) {
    chart.x.push_back(static_cast<double>(record.step));
  }
  for (const Category& category : kCategories) {
    chart::Layer layer{.name = category.name, .look = category.look, .values = {}};
    for (const StepRecord& record : records) {
      layer.values.push_back(static_cast<double>(record.memory.*category.bytes));
    }
    if (std::any_of(layer.values.begin(), layer.values.end(), [](double v) { return v > 0; })) {
      chart.layers.push_back(layer);
    }
  }
  return chart::area_chart(chart);
}

std::string memory_peak(const Records& records) {
  const auto peak = std::max_element(records.begin(), records.end(), [](const StepRecord& a, const StepRecord& b) {
    return a.peak_bytes < b.peak_bytes;
  });
  if (peak == records.end()) {
    return "";
  }
  double total = 0;
  for (const Category& category : kCategories) {
    total += std::max(0.0, static_cast<double>(peak->memory.*category.bytes));
  }
  chart::BarChart chart{
      .title = "Memory at the peak",
      .caption = fmt::format("{} at step {}", chart::byte_text(peak->peak_bytes), chart::grouped(peak->step)),
      .quantity = chart::Quantity::Bytes};
  for (const Category& category : kCategories) {
    const double bytes = std::max(0.0, static_cast<double>(peak->memory.*category.bytes));
    chart::Bar bar{.name = category.name,
                   .values = std::vector<double>(kCategories.size()),
                   .note = fmt::format("{:.1f} %", total > 0 ? 100 * bytes / total : 0)};
    bar.values[chart.parts.size()] = bytes;
    chart.parts.push_back({.name = "", .look = category.look});  // the bars themselves have names
    chart.bars.push_back(std::move(bar));
  }
  return chart::bar_chart(chart);
}

}  // namespace snug::detail
