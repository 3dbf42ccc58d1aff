#include "snug/step_plan.h"

#include <algorithm>
#include <cctype>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/core/versioned_json.h"
#include "src/planner/search.h"
#include "src/planner/simulator.h"
#include "src/planner/solution.h"
#include "src/remat/activation_plan.h"
#include "src/step/saved_plans.h"

namespace snug {
namespace {

using Json = detail::OrderedJson;

constexpr detail::JsonKind kStepPlanJson{
    .key = "snug_step_plan", .type = "StepPlan", .noun = "plan", .cure = "plan again"};

// One word, or three words.
std::string way_of(const ActivationPlan& plan) {
  const plan::Simulation run = detail::PlanContent::of(plan).simulator().run(detail::solution_of(plan).stays);
  const bool rebuilds = std::ranges::any_of(run.replays, [](const auto& one) { return !one.operators.empty(); });
  return run.offloaded.empty() ? "recompute" : rebuilds ? "recompute and offload" : "offload";
}

std::string cut_of(const StepChoice& choice) {
  return fmt::format("{} micro-batch{} of {}", choice.micro_batches, choice.micro_batches == 1 ? "" : "es",
                     choice.items);
}

constexpr struct {
  const char* key;
  const char* label;
  PlacedBytes BytesByKind::* placed;
} kKinds[] = {{"weights", "weights, buffers", &BytesByKind::weights},
              {"gradients", "gradients", &BytesByKind::gradients},
              {"optimizer_state", "optimizer's state", &BytesByKind::optimizer_state},
              {"activations", "activations", &BytesByKind::activations}};

std::string table_of(const BytesByKind& bytes) {
  std::string text = fmt::format("\n{:>20}    in memory      outside\n", "");
  for (const auto& kind : kKinds) {
    const PlacedBytes& placed = bytes.*kind.placed;
    text +=
        fmt::format("{:<20} {:>12} {:>12}\n", kind.label, Bytes(placed.in_memory).str(), Bytes(placed.outside).str());
  }
  return text;
}

Json json_of(const BytesByKind& bytes) {
  Json json;
  for (const auto& kind : kKinds) {
    const PlacedBytes& placed = bytes.*kind.placed;
    json[kind.key] = {placed.in_memory, placed.outside};
  }
  return json;
}

plan::Choice planner_choice(const StepChoice& choice) {
  return {.items = choice.items,
          .micro_batches = choice.micro_batches,
          .plan = choice.plan ? *choice.plan : plan::Solution(),
          .peak_bytes = choice.peak_bytes,
          .seconds = choice.seconds};
}

BytesByKind bytes_from(const Json& json) {
  BytesByKind bytes;
  for (const auto& kind : kKinds) {
    const Json& placed = json.at(kind.key);
    const PlacedBytes read{detail::whole_number<int64_t>(placed.at(0)), detail::whole_number<int64_t>(placed.at(1))};
    if (placed.size() != 2 || read.in_memory < 0 || read.outside < 0) {
      throw ConfigError(
          fmt::format("StepPlan: the bytes of {} are {}; give two numbers >= 0", kind.key, placed.dump()));
    }
    bytes.*kind.placed = read;
  }
  return bytes;
}

}  // namespace

StepChoice detail::step_choice(plan::Choice choice) {
  return {.items = choice.items,
          .micro_batches = choice.micro_batches,
          .peak_bytes = choice.peak_bytes,
          .seconds = choice.seconds,
          .plan = std::make_shared<const plan::Solution>(std::move(choice.plan))};
}

bool operator==(const StepChoice& a, const StepChoice& b) { return planner_choice(a) == planner_choice(b); }

std::string StepPlan::explain() const {
  const std::string file = read_from.empty() ? "" : fmt::format("Read from {}.\n", read_from.string());
  std::string text =
      fmt::format("{}, {:.3f} ms a step and {} at its peak predicted, of {} allowed\n{}\n{}", cut_of(choice),
                  1e3 * choice.seconds, Bytes(choice.peak_bytes).str(), Bytes(budget_bytes).str(), file, considered);
  if (bytes != BytesByKind()) {
    text += table_of(bytes);
  }
  if (slices > 1) {
    text += fmt::format("\nWhat the model runs by snug::sliced runs in {} slices, each computed again in backward.\n",
                        slices);
  }
  if (placement.state == Place::File) {
    text += "\nThe optimizer's state is in a file, and each update streams it through memory.\n";
  }
  if (placement.state == Place::Host) {
    text +=
        "\nThe optimizer's state is in the host's memory. The CPU makes the updates, from gradients and weights that are "
        "copied there and back.\n";
  }
  if (placement.model == Place::File) {
    text += "\nWeights and gradients are in files. An operator's weights come into memory when it runs.\n";
  }
  if (placement.model == Place::Host) {
    text +=
        "\nWeights and gradients are in the host's memory. An operator's weights come to the device when it runs.\n";
  }
  if (spare_bytes > 0) {
    text += fmt::format(
        "\nThe window of weights has {} more, which the budget leaves free. The time is that of the smallest window.\n",
        Bytes(spare_bytes).str());
  }
  if (activations) {
    text += fmt::format("\nWithin a micro-batch:\n{}", activations->explain());
  } else if (slices == 1) {
    text += "\nEverything is kept.\n";
  }
  return text;
}

std::string StepPlan::verdict() const {
  const char* const files =
      placement.model == Place::File   ? " Weights, gradients and the optimizer's state go to files."
      : placement.model == Place::Host ? " Weights, gradients and the optimizer's state go to the host's memory."
      : placement.state == Place::File ? " The optimizer's state goes to a file."
      : placement.state == Place::Host ? " The optimizer's state goes to the host's memory."
                                       : "";
  return verdict_on_activations() + files;
}

std::string StepPlan::verdict_on_activations() const {
  const std::string cut = cut_of(choice);
  if (slices > 1) {
    return fmt::format("Slices: {}, its large layers in {} slices{}.", cut, slices,
                       activations ? ", and " + way_of(*activations) + " of the rest" : "");
  }
  if (choice.micro_batches == 1 && !activations) {
    return placement.state != Place::Memory ? "Keep all activations, and take the batch at once."
                                            : "It fits as it is: keep everything, and take the batch at once.";
  }
  if (!activations) {
    return fmt::format("Accumulate: {}, with everything kept.", cut);
  }
  std::string how = way_of(*activations);
  const double more = 100 * (activations->predicted_seconds / activations->plain_seconds - 1);
  if (choice.micro_batches == 1) {
    how.front() = static_cast<char>(std::toupper(how.front()));
    return fmt::format("{}: the batch at once, in {:.1f} % more time than if everything could be kept.", how, more);
  }
  return fmt::format("Accumulate and {}: {}, in {:.1f} % more time than if everything could be kept.", how, cut, more);
}

std::string StepPlan::to_json() const {
  Json json = detail::versioned_json(kStepPlanJson, {{"budget_bytes", budget_bytes},
                                                     {"choice", Json::parse(planner_choice(choice).to_json())},
                                                     {"slices", slices},
                                                     {"state_in_file", placement.state == Place::File},
                                                     {"state_on_host", placement.state == Place::Host},
                                                     {"model_in_file", placement.model == Place::File},
                                                     {"model_on_host", placement.model == Place::Host},
                                                     {"bytes", json_of(bytes)},
                                                     {"considered", considered}});
  if (activations) {
    json["activations"] = Json::parse(activations->to_json());
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);  // `considered` may name a file
}

StepPlan StepPlan::from_json(std::string_view text) {
  return detail::read_versioned_json(kStepPlanJson, text, [](const Json& json) {
    const auto is = [&](const char* key) { return json.value(key, false); };
    const Place state = is("state_in_file") ? Place::File : is("state_on_host") ? Place::Host : Place::Memory;
    const Place model = is("model_in_file") ? Place::File : is("model_on_host") ? Place::Host : Place::Memory;
    StepPlan plan{.budget_bytes = detail::whole_number<int64_t>(json.at("budget_bytes")),
                  .choice = detail::step_choice(plan::Choice::from_json(json.at("choice").dump())),
                  .slices = json.value("slices", int64_t{1}),
                  .placement = {.state = state, .model = model},
                  .considered = json.at("considered").get<std::string>()};
    if (json.contains("bytes")) {
      plan.bytes = bytes_from(json.at("bytes"));
    }
    if (json.contains("activations")) {
      plan.activations = ActivationPlan::from_json(json.at("activations").dump());
    }
    return plan;
  });
}

}  // namespace snug
