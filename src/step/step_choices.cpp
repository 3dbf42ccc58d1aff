#include "src/step/step_choices.h"

#include <string>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "snug/core.h"
#include "src/step/step_kind_json.h"

namespace snug::detail {

const StepChoices::Choice* StepChoices::find(const StepToPlan& step) const {
  const Choice* found = nullptr;
  for (const Choice& choice : choices_) {
    // A batch that was not cut tells nothing about larger batches.
    const bool large_enough = step.counts.batch <= choice.batch || choice.items < choice.batch;
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
    nlohmann::json one = json_of(choice.kind);
    one.update({{"batch", choice.batch}, {"items", choice.items}, {"slices", choice.slices}});
    all.push_back(std::move(one));
  }
  return all.dump();
}

StepChoices StepChoices::parse(const std::string& text) {
  StepChoices result;
  try {
    for (const nlohmann::json& one : nlohmann::json::parse(text)) {
      Choice choice{.kind = kind_from(one),
                    .batch = whole_number<int64_t>(one.at("batch")),
                    .items = whole_number<int64_t>(one.at("items")),
                    .slices = one.value("slices", int64_t{1})};
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
