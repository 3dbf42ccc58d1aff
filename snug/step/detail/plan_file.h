#pragma once
// PlanFile: the plans of a Stepper in a file, for the next program that makes the same steps. The file's name is a hash
// of all that plans depend on (describe_stepper), and its content begins with that text, so that files of other
// Steppers lie beside it.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "snug/core/stateful_optimizer.h"
#include "snug/remat/rematerialize.h"
#include "snug/step/detail/step_to_plan.h"
#include "snug/step/step_plan.h"

namespace snug::detail {

/// Bytes and items that a plan was made for.
struct PlannedFor {
  int64_t batch = 0;         ///< items
  int64_t at_most = 0;       ///< items in a micro-batch, for other ranks' sake
  int64_t fixed_bytes = 0;   ///< alive all the time, but for state that is idle
  int64_t effect_bytes = 0;  ///< of copies of what the step writes outside of itself
  int64_t kept_bytes = 0;    ///< of results that the program keeps until the next step, in profiles: see ProfiledStep
  int64_t idle_state_bytes = 0;  ///< of parameters that get no gradient: fixed_bytes is without
  int64_t gradient_bytes = 0;
  int64_t optimizer_bytes = 0;
  StateFileBytes state_file = {};
  ModelFileBytes model_file = {};
  int64_t left_free = 0;  ///< since a step, or a plan that was tried, ran out of memory
};

struct SavedPlan {
  StepKind kind = {};
  PlannedFor planned_for = {};
  StepPlan plan = {};
  /// Where the plan keeps everything: the operators of its micro-batch, all kept.
  std::optional<ActivationPlan> recorded = {};
};

class PlanFile {
 public:
  /// `holds_for`: see describe_stepper. Touches nothing.
  PlanFile(const std::filesystem::path& folder, std::string holds_for);

  const std::filesystem::path& path() const { return path_; }

  /// None where there is no file. Throws snug::Error, or what the C++ library does, for a file that cannot be read,
  /// that write() did not make, or whose plans contradict themselves.
  std::vector<SavedPlan> read() const;
  /// Replaces the file, atomically. Throws Error.
  void write(const std::vector<SavedPlan>& plans) const;

 private:
  std::string holds_for_;
  std::filesystem::path path_;
};

}  // namespace snug::detail
