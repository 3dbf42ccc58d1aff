#pragma once
// StepPlan: what a Stepper made of its memory_budget: into how many micro-batches it cuts a batch, and what of each it
// keeps and what it computes again. Plain data: look at it, save it beside the run, read it back.
//
//   if (const auto plan = stepper.plan()) std::cout << plan->explain();

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "snug/planner/step_search.h"
#include "snug/remat/rematerialize.h"

namespace snug {

/// How many bytes of one kind are where.
struct PlacedBytes {
  int64_t in_memory = 0;  ///< of the model's device
  int64_t outside = 0;    ///< in files; of a device's activations, in pinned memory of the host

  friend bool operator==(const PlacedBytes&, const PlacedBytes&) = default;
};

/// The bytes of a step by kind, for people: at no moment are all of them there. Workspace, the batch and small things
/// are in none of them.
struct BytesByKind {
  /// Buffers and the Stepper's FP32 masters, too. With weights outside: the window through which they pass is in
  /// memory.
  PlacedBytes weights;
  PlacedBytes gradients;        ///< once backward has run
  PlacedBytes optimizer_state;  ///< of all parameters that are trained, once there is one
  PlacedBytes activations;      ///< of a micro-batch: in memory at its peak, and outside at any time

  friend bool operator==(const BytesByKind&, const BytesByKind&) = default;
};

struct StepPlan {
  int64_t budget_bytes = 0;  ///< memory_budget
  /// The micro-batch, and what the step takes in seconds and bytes. Bytes are of everything: model, optimizer, batch,
  /// gradients, activations.
  StepChoice choice = {};
  int64_t slices = 1;           ///< into which snug::sliced cuts, where the model leaves it to the plan
  bool state_in_file = false;   ///< the optimizer's, and not in memory
  bool model_in_file = false;   ///< weights, large buffers and gradients, likewise
  std::string considered = {};  ///< a table, for people: every micro-batch that was tried, and why not
  BytesByKind bytes = {};       ///< and where they are; all 0 where an earlier version of snug made the plan
  std::optional<ActivationPlan> activations = {};  ///< none: all is kept, but in slices, as in plain training

  /// The file in StepperOptions::plan_folder that an earlier program left; empty: it was made here, or read by
  /// from_json.
  std::filesystem::path read_from = {};

  /// For people: the choice, what else was considered, what is alive at the peak, what is computed again and what that
  /// costs.
  std::string explain() const;

  /// What to do, in a sentence. docs/fit.md has the techniques and when to use them.
  std::string verdict() const;

  /// The plan and everything that explain() tells.
  std::string to_json() const;
  /// Throws ConfigError for what is not a plan, or is one of another format version.
  static StepPlan from_json(std::string_view text);

 private:
  std::string verdict_on_activations() const;
};

}  // namespace snug
