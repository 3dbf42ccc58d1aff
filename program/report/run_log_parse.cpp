#include "program/report/run_log_parse.h"

#include <limits>
#include <optional>
#include <stdexcept>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "program/report/record_fields.h"
#include "program/report/run_log_format.h"
#include "snug/core.h"

namespace snug::detail {
namespace {

using Json = nlohmann::ordered_json;

// The error in a line; parse_run_log adds the file and the line's number.
class LineError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

const Json& member(const Json& object, const char* name) {
  const auto found = object.find(name);
  if (found == object.end()) {
    throw LineError(fmt::format("\"{}\" is missing", name));
  }
  return *found;
}

bool fits_int64(const Json& value) {
  return value.is_number_integer() &&
         (!value.is_number_unsigned() ||
          value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()));
}

int64_t read_integer(const Json& object, const char* name) {
  const Json& value = member(object, name);
  if (!fits_int64(value)) {
    throw LineError(fmt::format("\"{}\" is not a 64-bit integer", name));
  }
  return value.get<int64_t>();
}

double read_double(const Json& object, const char* name) {
  const Json& value = member(object, name);
  if (value.is_number()) {
    return value.get<double>();
  }
  if (value == "nan") {
    return std::numeric_limits<double>::quiet_NaN();
  }
  if (value == "inf") {
    return std::numeric_limits<double>::infinity();
  }
  if (value == "-inf") {
    return -std::numeric_limits<double>::infinity();
  }
  throw LineError(fmt::format("\"{}\" is not a number", name));
}

bool read_bool(const Json& object, const char* name) {
  const Json& value = member(object, name);
  if (!value.is_boolean()) {
    throw LineError(fmt::format("\"{}\" is neither true nor false", name));
  }
  return value.get<bool>();
}

const Json& read_object(const Json& object, const char* name) {
  const Json& value = member(object, name);
  if (!value.is_object()) {
    throw LineError(fmt::format("\"{}\" is not an object", name));
  }
  return value;
}

LogValue read_value(const std::string& name, const Json& value) {
  if (value.is_string()) {
    return value.get<std::string>();
  }
  if (value.is_boolean()) {
    return value.get<bool>();
  }
  if (value.is_number_float()) {
    return value.get<double>();
  }
  if (fits_int64(value)) {
    return value.get<int64_t>();
  }
  throw LineError(fmt::format("\"{}\" is neither a string, a number nor a boolean", name));
}

LogValues read_settings(const Json& object) {
  const int64_t version = read_integer(object, "snug_run");
  if (version != kRunLogVersion) {
    throw LineError(fmt::format("the log's version is {}, this program reads {}", version, kRunLogVersion));
  }
  LogValues settings;
  for (const auto& [name, value] : read_object(object, "settings").items()) {
    settings.emplace_back(name, read_value(name, value));
  }
  return settings;
}

RunEvent read_event(const Json& object) {
  RunEvent event;
  for (const auto& [name, value] : object.items()) {
    if (name == "event") {
      if (!value.is_string()) {
        throw LineError("\"event\" is not a string");
      }
      event.name = value.get<std::string>();
    } else if (name == "step") {
      event.step = read_integer(object, "step");
    } else {
      event.details.emplace_back(name, read_value(name, value));
    }
  }
  read_integer(object, "step");  // must exist
  return event;
}

// Reads the fields of a group; optional fields of the group may be missing.
struct FieldReader {
  const Json& object;

  void operator()(RecordField field, double& value) const { value = read_double(object, field.name); }
  void operator()(RecordField field, int64_t& value) const { value = read_integer(object, field.name); }
  void operator()(RecordField field, bool& value) const { value = read_bool(object, field.name); }
  template <FieldGroup Group>
  void operator()(RecordField field, Group& group) const {
    visit_fields(group, FieldReader{read_object(object, field.name)});
  }
  template <class T>
  void operator()(RecordField field, std::optional<T>& value) const {
    if (object.contains(field.name)) {
      (*this)(field, value.emplace());
    }
  }
};

StepRecord read_record(const Json& object) {
  StepRecord record;
  visit_fields(record, FieldReader{object});
  return record;
}

LogLine parse_line(std::string_view text, bool first) {
  const Json object = Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (object.is_discarded() || !object.is_object()) {
    throw LineError("it is not a JSON object");
  }
  if (first) {
    return {text, read_settings(object)};
  }
  if (object.contains("event")) {
    return {text, read_event(object)};
  }
  return {text, read_record(object)};
}

}  // namespace

std::vector<LogLine> parse_run_log(std::string_view content, std::string_view file) {
  std::vector<LogLine> lines;
  size_t begin = 0;
  for (size_t end = content.find('\n'); end != std::string_view::npos; end = content.find('\n', begin)) {
    try {
      lines.push_back(parse_line(content.substr(begin, end - begin), lines.empty()));
    } catch (const LineError& error) {
      throw CorruptFile(fmt::format("read_run_log: {}, line {}: {}; the file was damaged or is no run log", file,
                                    lines.size() + 1, error.what()));
    }
    begin = end + 1;
  }
  if (lines.empty()) {
    throw CorruptFile(
        fmt::format("read_run_log: {}, line 1: there is no settings line; the file is empty or no run log", file));
  }
  return lines;
}

}  // namespace snug::detail
