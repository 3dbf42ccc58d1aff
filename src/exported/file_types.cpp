#include "src/exported/file_types.h"

#include <limits>
#include <map>
#include <string>

#include <fmt/format.h>

namespace snug::detail {
namespace {

template <class T>
T named_by(const std::map<int64_t, T>& all, const ExportJson& code, const char* what) {
  const auto found = code.is_number_integer() ? all.find(code.get<int64_t>()) : all.end();
  if (found == all.end()) {
    throw CorruptFile(fmt::format("{} {} is not known", what, code.is_number() ? code.dump() : "that is no number"));
  }
  return found->second;
}

}  // namespace

c10::ScalarType scalar_type_of(const ExportJson& code) {
  using c10::ScalarType;
  static const std::map<int64_t, ScalarType> all{{1, ScalarType::Byte},
                                                 {2, ScalarType::Char},
                                                 {3, ScalarType::Short},
                                                 {4, ScalarType::Int},
                                                 {5, ScalarType::Long},
                                                 {6, ScalarType::Half},
                                                 {7, ScalarType::Float},
                                                 {8, ScalarType::Double},
                                                 {9, ScalarType::ComplexHalf},
                                                 {10, ScalarType::ComplexFloat},
                                                 {11, ScalarType::ComplexDouble},
                                                 {12, ScalarType::Bool},
                                                 {13, ScalarType::BFloat16},
                                                 {28, ScalarType::UInt16},
                                                 {29, ScalarType::Float8_e4m3fn},
                                                 {30, ScalarType::Float8_e5m2},
                                                 {31, ScalarType::Float8_e4m3fnuz},
                                                 {32, ScalarType::Float8_e5m2fnuz},
                                                 {33, ScalarType::Float8_e8m0fnu},
                                                 {34, ScalarType::UInt32},
                                                 {35, ScalarType::UInt64}};
  return named_by(all, code, "dtype");
}

c10::MemoryFormat memory_format_of(const ExportJson& code) {
  using c10::MemoryFormat;
  static const std::map<int64_t, MemoryFormat> all{{1, MemoryFormat::Contiguous},
                                                   {2, MemoryFormat::ChannelsLast},
                                                   {3, MemoryFormat::ChannelsLast3d},
                                                   {4, MemoryFormat::Preserve}};
  return named_by(all, code, "memory format");
}

c10::Device device_of(const ExportJson& json) {
  const auto type = c10::Device(json.at("type").get<std::string>()).type();
  const ExportJson& index = json.at("index");
  return index.is_null() ? c10::Device(type) : c10::Device(type, index.get<c10::DeviceIndex>());
}

double float_of(const ExportJson& json) {
  if (!json.is_string()) {
    return json.get<double>();
  }
  static const std::map<std::string, double> words{{"Infinity", std::numeric_limits<double>::infinity()},
                                                   {"-Infinity", -std::numeric_limits<double>::infinity()},
                                                   {"NaN", std::numeric_limits<double>::quiet_NaN()}};
  const auto found = words.find(json.get<std::string>());
  if (found == words.end()) {
    throw CorruptFile(fmt::format("'{}' is no number", json.get<std::string>()));
  }
  return found->second;
}

}  // namespace snug::detail
