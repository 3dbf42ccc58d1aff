// Ticks stand at 1, 2 or 5 times a power of ten (Heckbert, "Nice Numbers for Graph Labels", Graphics Gems, 1990), or,
// for bytes, times a power of 1024. Values are clamped to the range of computation in doubles, so a log with 1e308
// still gives a chart.

#include "program/chart/axis.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <fmt/format.h>

#include "program/chart/text.h"

namespace snug::chart {
namespace {

constexpr double kLargest = 1e300;
constexpr double kSmallest = 1e-290;

// The smallest 1, 2 or 5 times a power of ten that is not below `value`.
double nice_step(double value) {
  const double power = std::pow(10.0, std::floor(std::log10(value)));
  const double digit = value / power;
  return power * (digit <= 1 ? 1 : digit <= 2 ? 2 : digit <= 5 ? 5 : 10);
}

// The unit of an axis's labels.
struct LabelUnit {
  double size = 1;
  std::string suffix;  // behind each label
  std::string name;    // once, beside the axis
};

LabelUnit prefix_unit(double largest, double base, const std::array<const char*, 6>& names) {
  LabelUnit unit;
  size_t index = 0;
  while (largest / unit.size >= base && index + 1 < names.size()) {
    unit.size *= base;
    ++index;
  }
  unit.name = names[index];
  return unit;
}

LabelUnit label_unit(double largest, Quantity quantity) {
  if (quantity == Quantity::Bytes) {
    return prefix_unit(largest, 1024, {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB"});
  }
  if (quantity == Quantity::Count && largest < 1e4) {
    return {};
  }
  if (quantity == Quantity::Count && largest < 1e18) {
    LabelUnit unit = prefix_unit(largest, 1000, {"", "k", "M", "G", "T", "P"});
    std::swap(unit.suffix, unit.name);
    return unit;
  }
  if (largest >= 0.01 && largest < 1e5) {
    return {};
  }
  const int exponent = static_cast<int>(std::floor(std::log10(largest)));
  return {.size = std::pow(10.0, exponent), .suffix = "", .name = "×10" + superscript(exponent)};
}

std::string tick_label(double shown, int decimals, const LabelUnit& unit) {
  if (std::abs(shown) >= 1e9) {  // beyond the largest unit
    return fmt::format("{:.3g}{}", shown, unit.suffix);
  }
  if (decimals == 0) {
    const int64_t whole = std::llround(shown);
    return whole == 0 ? "0" : grouped(whole) + unit.suffix;
  }
  const std::string digits = fmt::format("{:.{}f}", shown, decimals);
  const bool is_zero = digits.find_first_not_of("-0.") == std::string::npos;
  return is_zero ? "0" : digits + unit.suffix;
}

void add_linear_ticks(Axis& axis, double step, const LabelUnit& unit) {
  const double shown_step = step / unit.size;
  const int decimals = std::max(0, -static_cast<int>(std::floor(std::log10(shown_step) + 1e-9)));
  const double first = std::ceil(axis.low / step - 1e-9);
  for (int i = 0; i < 50; ++i) {
    const double value = (first + i) * step;
    if (value > axis.high + step * 1e-9) {
      break;
    }
    axis.ticks.push_back({axis.place(value), tick_label(value / unit.size, decimals, unit)});
  }
  axis.unit = unit.name;
}

// Makes room around a single value, or around values so close that doubles have no ticks between the values.
void widen(Extent& extent) {
  const double largest = std::max(std::abs(extent.low), std::abs(extent.high));
  if (largest < kSmallest) {
    extent = {.low = 0, .high = 1};
  } else if (extent.high - extent.low < 1e-9 * largest) {
    extent.low -= largest / 10;
    extent.high += largest / 10;
  }
}

Axis linear_axis(Extent extent, const AxisOptions& options) {
  if (options.from_zero) {
    extent.add(0);
  }
  widen(extent);
  const double largest = std::max(std::abs(extent.low), std::abs(extent.high));
  const LabelUnit unit = label_unit(largest, options.quantity);
  // Steps are round in the unit that is shown: 200 MiB, 0.5 GiB.
  double step = nice_step((extent.high - extent.low) / options.about_ticks / unit.size) * unit.size;
  if (options.quantity != Quantity::Number) {
    step = std::max(step, 1.0);
  }
  Axis axis;
  axis.low = options.tight ? extent.low : std::floor(extent.low / step + 1e-9) * step;
  axis.high = options.tight ? extent.high : std::ceil(extent.high / step - 1e-9) * step;
  if (axis.high <= axis.low) {  // all values lie within the rounding above
    axis.high = axis.low + step;
  }
  add_linear_ticks(axis, step, unit);
  return axis;
}

// Powers as numbers if all numbers of the axis are short enough, else 10⁻⁴.
std::string power_label(double base, int exponent, const Axis& axis, Quantity quantity) {
  if (quantity == Quantity::Bytes && base == 2 && exponent >= 0 && exponent < 60) {
    constexpr std::array<const char*, 6> kUnits{"bytes", "KiB", "MiB", "GiB", "TiB", "PiB"};
    return fmt::format("{} {}", 1 << exponent % 10, kUnits[static_cast<size_t>(exponent / 10)]);
  }
  const double lowest = std::pow(base, axis.low);
  const double highest = std::pow(base, axis.high);
  if (lowest >= 0.001 && highest < 1e6) {
    const double value = std::pow(base, exponent);
    return value < 1 ? fmt::format("{:g}", value) : grouped(std::llround(value));
  }
  return fmt::format("{:g}", base) + superscript(exponent);
}

Axis log_axis(const Extent& extent, const AxisOptions& options) {
  Axis axis;
  axis.log_base = options.log_base;
  const double scale = std::log(options.log_base);
  int low = static_cast<int>(std::floor(std::log(extent.low) / scale + 1e-9));
  int high = static_cast<int>(std::ceil(std::log(extent.high) / scale - 1e-9));
  if (low == high) {
    --low;
    ++high;
  }
  axis.low = low;
  axis.high = high;
  const int stride = std::max(1, (high - low + options.about_ticks - 1) / options.about_ticks);
  for (int exponent = low; exponent <= high; exponent += stride) {
    axis.ticks.push_back({static_cast<double>(exponent - low) / (high - low),
                          power_label(options.log_base, exponent, axis, options.quantity)});
  }
  return axis;
}

}  // namespace

void Extent::add(double value) {
  if (!std::isfinite(value)) {
    return;
  }
  value = std::clamp(value, -kLargest, kLargest);
  if (empty()) {
    low = value;
    high = value;
  }
  low = std::min(low, value);
  high = std::max(high, value);
}

double Axis::place(double value) const {
  if (log_base > 0) {
    value = value > 0 ? std::log(value) / std::log(log_base) : low;
  }
  return std::clamp((value - low) / (high - low), 0.0, 1.0);
}

Axis make_axis(Extent extent, const AxisOptions& options) {
  if (extent.empty()) {
    extent = {.low = 0, .high = 1};
  }
  return options.log_base > 0 && extent.low > kSmallest ? log_axis(extent, options) : linear_axis(extent, options);
}

}  // namespace snug::chart
