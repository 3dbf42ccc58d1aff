#include "src/step/step_choices.h"

#include <algorithm>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "snug/core.h"
#include "src/core/parse_json.h"

namespace snug::detail {

using Json = nlohmann::ordered_json;

Json json_of(const StepKind& kind) {
  Json tensors = Json::array();
  for (const auto& [type, sizes] : kind.shape.tensors) {
    tensors.push_back({static_cast<int>(type), sizes});
  }
  return {{"modes", kind.modes}, {"trained", kind.trained}, {"tensors", tensors}};
}

StepKind kind_from(const Json& json) {
  constexpr int64_t kMost = int64_t{1} << 48;  // elements; a comparison of kinds multiplies the sizes
  StepKind kind{.modes = whole_number<uint32_t>(json.at("modes")),
                .trained = whole_number<uint32_t>(json.at("trained"))};
  for (const Json& tensor : json.at("tensors")) {
    std::vector<int64_t> sizes;
    int64_t product = 1;
    for (const Json& size : tensor.at(1).get_ref<const Json::array_t&>()) {
      sizes.push_back(whole_number<int64_t>(size));
      if (sizes.back() < 0 || sizes.back() >= kMost / product) {
        throw CorruptFile(fmt::format("Stepper: the plan of a step has a tensor of the sizes {}", tensor.at(1).dump()));
      }
      product *= std::max<int64_t>(sizes.back(), 1);
    }
    kind.shape.tensors.emplace_back(static_cast<at::ScalarType>(whole_number<int>(tensor.at(0))), std::move(sizes));
  }
  return kind;
}

const StepChoices::Choice* StepChoices::find(const StepToPlan& step) const {
  const Choice* found = nullptr;
  for (const Choice& choice : choices_) {
    // A batch that was not cut tells nothing about larger batches.
    const bool large_enough = step.counts.batch <= choice.batch || choice.items < choice.batch;
    if (large_enough && covers(choice.kind, step.kind) && (found == nullptr || choice.kind == step.kind)) {
      found = &choice;
    }
  }
  const auto growth_of = [&](const Choice& choice) {
    return growth(choice.kind, choice.items, choice.items < choice.batch, step);
  };
  return found != nullptr ? found : closest(choices_, growth_of);
}

void StepChoices::remember(Choice choice) {
  std::erase_if(choices_,
                [&](const Choice& old) { return old.batch <= choice.batch && covers(choice.kind, old.kind); });
  choices_.push_back(std::move(choice));
}

std::string StepChoices::to_text() const {
  Json all = Json::array();
  for (const Choice& choice : choices_) {
    Json one = json_of(choice.kind);
    one.update({{"batch", choice.batch}, {"items", choice.items}, {"slices", choice.slices}});
    all.push_back(std::move(one));
  }
  return all.dump();
}

StepChoices StepChoices::parse(const std::string& text) {
  StepChoices result;
  try {
    for (const Json& one : parse_json<Json>(text)) {
      Choice choice{.kind = kind_from(one),
                    .batch = whole_number<int64_t>(one.at("batch")),
                    .items = whole_number<int64_t>(one.at("items")),
                    .slices = one.contains("slices") ? whole_number<int64_t>(one["slices"]) : 1};
      if (choice.items < 1 || choice.items > choice.batch || choice.slices < 1) {
        throw CorruptFile(fmt::format("Stepper.load_state_dict: a micro-batch of {} items of {} in {} slices cannot be",
                                      choice.items, choice.batch, choice.slices));
      }
      result.choices_.push_back(std::move(choice));
    }
  } catch (const Json::exception& error) {
    throw CorruptFile(fmt::format("Stepper.load_state_dict: micro_batches is not as saved: {}", error.what()));
  }
  return result;
}

}  // namespace snug::detail
