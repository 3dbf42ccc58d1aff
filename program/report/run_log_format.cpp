#include "program/report/run_log_format.h"

#include <cmath>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "program/report/record_fields.h"
#include "snug/core.h"

namespace snug::detail {
namespace {

using Json = nlohmann::ordered_json;

// JSON has no NaN and no infinities. The JSON library writes finite doubles with as many digits as needed to read back
// the same double.
Json number(double value) {
  if (std::isnan(value)) {
    return "nan";
  }
  if (std::isinf(value)) {
    return value > 0 ? "inf" : "-inf";
  }
  return value;
}

Json to_json(const LogValue& value) {
  if (const double* real = std::get_if<double>(&value)) {
    return number(*real);
  }
  return std::visit([](const auto& plain) { return Json(plain); }, value);
}

// Adds a group's fields to an object, without fields that are empty.
struct FieldWriter {
  Json& object;

  void operator()(RecordField field, double value) const { object[field.name] = number(value); }
  void operator()(RecordField field, int64_t value) const { object[field.name] = value; }
  void operator()(RecordField field, bool value) const { object[field.name] = value; }
  template <FieldGroup Group>
  void operator()(RecordField field, const Group& group) const {
    visit_fields(group, FieldWriter{object[field.name]});
  }
  template <class T>
  void operator()(RecordField field, const std::optional<T>& value) const {
    if (value) {
      (*this)(field, *value);
    }
  }
};

void add_values(Json& object, const LogValues& values, std::string_view what) {
  for (const auto& [name, value] : values) {
    if (object.contains(name)) {
      throw ConfigError(
          fmt::format("RunLog: {} \"{}\" is there twice; every name in a line can be used once", what, name));
    }
    object[name] = to_json(value);
  }
}

std::string line(const Json& object) { return object.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace

std::string settings_line(const LogValues& settings) {
  Json values = Json::object();
  add_values(values, settings, "setting");
  return line({{"snug_run", kRunLogVersion}, {"settings", std::move(values)}});
}

std::string record_line(const StepRecord& record) {
  Json object;
  visit_fields(record, FieldWriter{object});
  return line(object);
}

std::string event_line(const RunEvent& event) {
  Json object{{"event", event.name}, {"step", event.step}};
  add_values(object, event.details, "event detail");
  return line(object);
}

}  // namespace snug::detail
