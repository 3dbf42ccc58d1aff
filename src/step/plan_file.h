#pragma once
// PlanFile: the plans of a Stepper in a file, for the next program that makes the same steps. The name of the file is a
// hash of everything that plans depend on (describe_stepper). The content of the file begins with the same description,
// so that the files of several Steppers can share a folder.

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "snug/plan.h"
#include "snug/step_plan.h"
#include "src/step/step_to_plan.h"

namespace snug::detail {

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
