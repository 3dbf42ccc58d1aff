#pragma once
// What a Stepper saves of its plans:
// - StepChoices: the chosen micro-batch for each batch. The choices are saved with a run, so that a resumed run makes
//   the same steps.
// - PlanFile: the plans in a file, for the next program that makes the same steps. The name of the file is a hash of
//   everything that plans depend on (describe_stepper). The content of the file begins with the same description, so
//   that the files of several Steppers can share a folder.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "snug/plan.h"
#include "snug/step_plan.h"
#include "src/planner/search.h"
#include "src/step/step_to_plan.h"

namespace snug::detail {

/// The most slices of snug::sliced that a plan has.
inline constexpr int64_t kMostSlices = 256;

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

struct SavedPlan {
  StepKind kind = {};
  StepCounts counts = {};
  StepPlan plan = {};
  /// For a plan that keeps everything: the operators of the micro-batch, all kept.
  std::optional<ActivationPlan> recorded = {};
};

class PlanFile {
 public:
  /// `holds_for`: see describe_stepper. Touches nothing.
  PlanFile(const std::filesystem::path& folder, std::string holds_for);

  const std::filesystem::path& path() const { return path_; }

  /// Empty without a file. Throws snug::Error, or exceptions of the C++ library, for a file that cannot be read, that
  /// write() did not make, or whose plans contradict themselves.
  std::vector<SavedPlan> read() const;
  /// Replaces the file, atomically. Throws Error.
  void write(const std::vector<SavedPlan>& plans) const;

 private:
  std::string holds_for_;
  std::filesystem::path path_;
};

}  // namespace snug::detail
