#pragma once
// StepChoices: the chosen micro-batch for each batch. The choices are saved with a run, so that a resumed run makes the
// same steps. Choices and plan files write a StepKind alike.

#include <cstdint>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "src/planner/search.h"
#include "src/step/step_to_plan.h"

namespace snug::detail {

/// A StepKind as three fields of an object. The object may have other fields.
nlohmann::ordered_json json_of(const StepKind& kind);
/// Throws nlohmann's exceptions if a field is missing or of another type, and CorruptFile for sizes that no tensor has.
StepKind kind_from(const nlohmann::ordered_json& json);

/// The choice of the planner as the choice of a StepPlan.
StepChoice step_choice(plan::Choice choice);

class StepChoices {
 public:
  struct Choice {
    StepKind kind;
    int64_t batch;
    int64_t items;
    int64_t slices;
  };

  /// The choice for such a batch or a larger batch, in this run or before the run was saved; null: no choice.
  const Choice* find(const StepToPlan& step) const;
  /// The choice replaces all choices that the choice covers, as a plan does.
  void remember(Choice choice);

  std::string to_text() const;
  /// Throws CorruptFile for anything that to_text() did not make.
  static StepChoices parse(const std::string& text);

 private:
  std::vector<Choice> choices_;
};

}  // namespace snug::detail
