#pragma once
// StepChoices: which micro-batch was chosen for which batch. It is saved with a run, so that the run makes the same
// steps when it is resumed.

#include <cstdint>
#include <string>
#include <vector>

#include "src/step/step_to_plan.h"

namespace snug::detail {

class StepChoices {
 public:
  struct Choice {
    StepKind kind;
    int64_t batch;
    int64_t items;
    int64_t slices;
  };

  /// For such a batch or a larger one, in this run or before it was saved; null: there is none.
  const Choice* find(const StepToPlan& step) const;
  /// As its plan does, it takes the place of those that it covers.
  void remember(Choice choice);

  std::string to_text() const;
  /// Throws CorruptFile for anything that to_text() did not make.
  static StepChoices parse(const std::string& text);

 private:
  std::vector<Choice> choices_;
};

}  // namespace snug::detail
