#pragma once
// The outer search: into how many micro-batches to cut a batch, and with which plan, so that a whole step stays within
// a number of bytes and is as fast as can be.
//
//   auto found = snug::search_step({{.items = 64, .simulator = &all}, {.items = 32, .simulator = &half}},
//                                  {.batch = 64, .budget = 300 << 20, .fixed_bytes = parameters,
//                                   .gradient_bytes = gradients});
//   if (!found.choice) std::cout << found.smallest_feasible_bytes << " bytes would do\n";

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "snug/planner/solver.h"

namespace snug {

struct MicroBatchCandidate {
  int64_t items = 0;                               ///< in every micro-batch; the last may have fewer
  const plan::StepSimulator* simulator = nullptr;  ///< of one with that many; not owned
  int64_t own_bytes = 0;                           ///< there beside its activations, such as copies of its items
};

/// The step that is to fit, and what is there beside its activations.
struct StepSearchOptions {
  int64_t batch = 0;             ///< items in a step
  int64_t budget = 0;            ///< bytes, for everything
  int64_t fixed_bytes = 0;       ///< there all the time: parameters, buffers, optimizer state, buckets
  int64_t gradient_bytes = 0;    ///< there from the second micro-batch on, and for the optimizer
  int64_t optimizer_bytes = 0;   ///< workspace of the optimizer's step
  double optimizer_seconds = 0;  ///< of its step
  plan::SolverOptions solver = {};
};

struct StepChoice {
  int64_t items = 0;          ///< in a micro-batch
  int64_t micro_batches = 1;  ///< in a step
  RematPlan plan = {};        ///< of one
  int64_t peak_bytes = 0;     ///< predicted, of everything
  double seconds = 0;         ///< predicted, of the step

  /// Seconds read back bit for bit.
  std::string to_json() const;

  /// Throws ConfigError for what is not a choice, or is one of another format version.
  static StepChoice from_json(std::string_view text);

  friend bool operator==(const StepChoice&, const StepChoice&) = default;
};

/// What became of one candidate.
struct ConsideredStep {
  int64_t items = 0;
  int64_t micro_batches = 1;
  int64_t plain_peak_bytes = 0;  ///< of everything, with nothing rebuilt
  double plain_seconds = 0;
  std::string verdict = {};
};

struct StepSearch {
  std::optional<StepChoice> choice = {};        ///< none if nothing fits
  int64_t smallest_feasible_bytes = 0;          ///< without a choice: the budget that would do
  int64_t lower_bound_bytes = 0;                ///< without a choice: no plan of any candidate takes less
  std::vector<ConsideredStep> considered = {};  ///< in the order of their plain times

  /// For people: a line for each candidate.
  std::string explain() const;
};

/// Equal times: the larger micro-batch. Candidates that would be slower even if they kept everything are not solved.
/// Throws ConfigError for no candidates, and sizes below 1.
StepSearch search_step(const std::vector<MicroBatchCandidate>& candidates, const StepSearchOptions& options);

}  // namespace snug
