// What a StepPlanner chose, as the text that is saved with a Stepper's state.

#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "snug/core/error.h"
#include "snug/train/detail/step_planner.h"

namespace snug::detail {

using Json = nlohmann::json;

std::string StepPlanner::choices() const {
  Json all = Json::array();
  for (const Choice& choice : choices_) {
    Json tensors = Json::array();
    for (const auto& [type, sizes] : choice.kind.shape.tensors) {
      tensors.push_back({static_cast<int>(type), sizes});
    }
    all.push_back({{"training", choice.kind.is_training},
                   {"trained", choice.kind.trained},
                   {"batch", choice.batch},
                   {"items", choice.items},
                   {"slices", choice.slices},
                   {"tensors", tensors}});
  }
  return all.dump();
}

std::vector<StepPlanner::Choice> StepPlanner::parse_choices(const std::string& text) {
  std::vector<Choice> choices;
  try {
    for (const Json& one : Json::parse(text)) {
      Choice choice{
          .kind = {.is_training = one.at("training").get<bool>(), .trained = one.at("trained").get<uint32_t>()},
          .batch = one.at("batch").get<int64_t>(),
          .items = one.at("items").get<int64_t>(),
          .slices = one.value("slices", int64_t{1})};
      for (const Json& tensor : one.at("tensors")) {
        choice.kind.shape.tensors.emplace_back(static_cast<at::ScalarType>(tensor.at(0).get<int>()),
                                               tensor.at(1).get<std::vector<int64_t>>());
      }
      if (choice.items < 1 || choice.items > choice.batch || choice.slices < 1) {
        throw CorruptFile(fmt::format("Stepper.load_state_dict: a micro-batch of {} items of {} in {} slices cannot be",
                                      choice.items, choice.batch, choice.slices));
      }
      choices.push_back(std::move(choice));
    }
  } catch (const Json::exception& error) {
    throw CorruptFile(fmt::format("Stepper.load_state_dict: micro_batches is not as saved: {}", error.what()));
  }
  return choices;
}

}  // namespace snug::detail
