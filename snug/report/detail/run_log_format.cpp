#include "snug/report/detail/run_log_format.h"

#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "snug/core/error.h"

namespace snug::detail {
namespace {

using Json = nlohmann::ordered_json;

// JSON has no NaN and no infinities. Finite doubles get as many digits as they need to read back as the same double;
// that is the library's doing.
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
  Json object{{"step", record.step}, {"loss", number(record.loss)}};
  if (record.validation_loss) {
    object["validation_loss"] = number(*record.validation_loss);
  }
  object["learning_rate"] = number(record.learning_rate);
  object["grad_norm"] = number(record.grad_norm);
  if (record.gradient_noise_scale) {
    object["gradient_noise_scale"] = number(*record.gradient_noise_scale);
  }
  object["loss_scale"] = number(record.loss_scale);
  object["stepped"] = record.stepped;
  object["items"] = record.items;
  object["micro_batches"] = record.micro_batches;
  object["peak_bytes"] = record.peak_bytes;
  object["activation_peak_bytes"] = record.activation_peak_bytes;
  object["memory"] = {{"parameters", record.memory.parameters},
                      {"gradients", record.memory.gradients},
                      {"optimizer_state", record.memory.optimizer_state},
                      {"activations", record.memory.activations},
                      {"workspace", record.memory.workspace},
                      {"other", record.memory.other}};
  if (record.communication) {
    object["communication"] = {{"bytes_sent", record.communication->bytes_sent},
                               {"seconds", number(record.communication->seconds)},
                               {"waited", number(record.communication->waited)}};
  }
  object["seconds"] = number(record.seconds);
  object["items_per_second"] = number(record.items_per_second);
  return line(object);
}

std::string event_line(const RunEvent& event) {
  Json object{{"event", event.name}, {"step", event.step}};
  add_values(object, event.details, "event detail");
  return line(object);
}

}  // namespace snug::detail
