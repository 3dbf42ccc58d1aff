#include "snug/step/detail/step_choices.h"

#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "snug/core/error.h"

namespace snug::detail {

const StepChoices::Choice* StepChoices::find(const StepToPlan& step) const {
  const Choice* found = nullptr;
  for (const Choice& choice : choices_) {
    // What was not cut says nothing of larger batches.
    const bool large_enough = step.batch <= choice.batch || choice.items < choice.batch;
    if (large_enough && covers(choice.kind, step.kind) && (found == nullptr || choice.kind == step.kind)) {
      found = &choice;
    }
  }
  return found;
}

void StepChoices::remember(Choice choice) {
  std::erase_if(choices_,
                [&](const Choice& old) { return old.batch <= choice.batch && covers(choice.kind, old.kind); });
  choices_.push_back(std::move(choice));
}

std::string StepChoices::to_text() const {
  nlohmann::json all = nlohmann::json::array();
  for (const Choice& choice : choices_) {
    nlohmann::json tensors = nlohmann::json::array();
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

StepChoices StepChoices::parse(const std::string& text) {
  StepChoices result;
  try {
    for (const nlohmann::json& one : nlohmann::json::parse(text)) {
      Choice choice{
          .kind = {.is_training = one.at("training").get<bool>(), .trained = one.at("trained").get<uint32_t>()},
          .batch = one.at("batch").get<int64_t>(),
          .items = one.at("items").get<int64_t>(),
          .slices = one.value("slices", int64_t{1})};
      for (const nlohmann::json& tensor : one.at("tensors")) {
        choice.kind.shape.tensors.emplace_back(static_cast<at::ScalarType>(tensor.at(0).get<int>()),
                                               tensor.at(1).get<std::vector<int64_t>>());
      }
      if (choice.items < 1 || choice.items > choice.batch || choice.slices < 1) {
        throw CorruptFile(fmt::format("Stepper.load_state_dict: a micro-batch of {} items of {} in {} slices cannot be",
                                      choice.items, choice.batch, choice.slices));
      }
      result.choices_.push_back(std::move(choice));
    }
  } catch (const nlohmann::json::exception& error) {
    throw CorruptFile(fmt::format("Stepper.load_state_dict: micro_batches is not as saved: {}", error.what()));
  }
  return result;
}

}  // namespace snug::detail
