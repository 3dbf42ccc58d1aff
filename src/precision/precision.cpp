#include "snug/precision.h"

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <string>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/precision/matmul_speed.h"

namespace snug {
namespace {

constexpr std::array kNames{
    std::pair{Precision::Float32, std::string_view("float32")},
    std::pair{Precision::BFloat16, std::string_view("bfloat16")},
    std::pair{Precision::Float16, std::string_view("float16")},
    std::pair{Precision::Auto, std::string_view("auto")},
};

}  // namespace

std::string_view to_string(Precision precision) {
  return std::find_if(kNames.begin(), kNames.end(), [&](auto& entry) { return entry.first == precision; })->second;
}

Precision precision_from_string(std::string_view name) {
  for (const auto& [precision, known] : kNames) {
    if (known == name) {
      return precision;
    }
  }
  throw ConfigError(fmt::format("precision: '{}' is unknown; give float32, bfloat16, float16 or auto", name));
}

c10::ScalarType compute_dtype(Precision precision) {
  switch (precision) {
    case Precision::Float32:
      return c10::ScalarType::Float;
    case Precision::BFloat16:
      return c10::ScalarType::BFloat16;
    case Precision::Float16:
      return c10::ScalarType::Half;
    case Precision::Auto:
      break;
  }
  throw ConfigError("compute_dtype: Precision::Auto has no dtype yet; resolve it with choose_precision");
}

Precision choose_precision(c10::Device device) {
  static std::mutex mutex;
  static std::map<std::string, Precision> known;
  const std::lock_guard lock(mutex);
  const std::string name = device.str();
  if (const auto found = known.find(name); found != known.end()) {
    return found->second;
  }
  return known[name] = detail::precision_for(detail::measure_matmul_speed(device), device.type());
}

}  // namespace snug
