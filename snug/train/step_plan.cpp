#include "snug/train/step_plan.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "snug/core/error.h"

namespace snug {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kFormatVersion = 1;

}  // namespace

std::string StepPlan::explain() const {
  std::string text =
      fmt::format("{} micro-batch{} of {}, {:.3f} ms a step and {} at its peak predicted, of {} allowed\n\n{}",
                  choice.micro_batches, choice.micro_batches == 1 ? "" : "es", choice.items, 1e3 * choice.seconds,
                  Bytes(choice.peak_bytes).str(), Bytes(budget_bytes).str(), considered);
  if (activations) {
    text += fmt::format("\nWithin a micro-batch:\n{}", activations->explain());
  } else {
    text += "\nNothing is computed again.\n";
  }
  return text;
}

std::string StepPlan::verdict() const {
  const std::string cut = fmt::format("{} micro-batches of {}", choice.micro_batches, choice.items);
  const double more = 100 * (choice.plan.seconds / choice.plan.plain_seconds - 1);
  if (choice.micro_batches == 1 && !activations) {
    return "It fits as it is: keep everything, and take the batch at once.";
  }
  if (!activations) {
    return fmt::format("Accumulate: {}, with everything kept.", cut);
  }
  if (choice.micro_batches == 1) {
    return fmt::format("Recompute: the batch at once, in {:.1f} % more time than if everything could be kept.", more);
  }
  return fmt::format("Accumulate and recompute: {}, in {:.1f} % more time than if everything could be kept.", cut,
                     more);
}

std::string StepPlan::to_json() const {
  Json json{{"snug_step_plan", kFormatVersion},
            {"budget_bytes", budget_bytes},
            {"choice", Json::parse(choice.to_json())},
            {"considered", considered}};
  if (activations) {
    json["activations"] = Json::parse(activations->to_json());
  }
  return json.dump();
}

StepPlan StepPlan::from_json(std::string_view text) {
  try {
    const Json json = Json::parse(text);
    if (const int version = json.at("snug_step_plan").get<int>(); version != kFormatVersion) {
      throw ConfigError(
          fmt::format("StepPlan: format version is {}, this program reads {}; plan again", version, kFormatVersion));
    }
    StepPlan plan{.budget_bytes = json.at("budget_bytes").get<int64_t>(),
                  .choice = StepChoice::from_json(json.at("choice").dump()),
                  .considered = json.at("considered").get<std::string>()};
    if (json.contains("activations")) {
      plan.activations = ActivationPlan::from_json(json.at("activations").dump());
    }
    return plan;
  } catch (const Json::exception& error) {
    throw ConfigError(fmt::format("StepPlan: not a plan in JSON: {}; plan again", error.what()));
  }
}

}  // namespace snug
