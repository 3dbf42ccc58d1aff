#pragma once
// search(): the outer search. The search chooses the number of micro-batches of a batch, and their plan, so that a
// whole step stays within a number of bytes and is as fast as possible.
//
//   auto found = plan::search({{.items = 64, .simulator = &all}, {.items = 32, .simulator = &half}},
//                             {.batch = 64, .budget = 300 << 20, .fixed_bytes = parameters,
//                              .gradient_bytes = gradients});
//   if (!found.choice) std::cout << "the smallest budget found is " << found.smallest_feasible_bytes << " bytes\n";

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/planner/solver.h"

namespace snug::plan {

/// Steps are not told apart by measured times if one takes at most so many times as long as the other.
inline constexpr double kApart = 1.05;

/// A size of micro-batches that the search may choose.
struct Candidate {
  int64_t items = 0;                     ///< in every micro-batch; the last may have fewer
  const Simulator* simulator = nullptr;  ///< of a micro-batch of so many items; not owned
  int64_t own_bytes = 0;                 ///< in memory beside its activations, for example copies of items
  Solver* solver = nullptr;              ///< of the simulator, with answers and options of its own; null: none
};

/// The step that must fit, and the memory and time beside the step's activations.
struct SearchOptions {
  int64_t batch = 0;             ///< items in a step
  int64_t budget = 0;            ///< bytes, for everything
  int64_t fixed_bytes = 0;       ///< in memory all the time: parameters, buffers, optimizer state, buckets
  int64_t gradient_bytes = 0;    ///< in memory from the second micro-batch on, and for the optimizer
  int64_t optimizer_bytes = 0;   ///< workspace of the optimizer's step
  double optimizer_seconds = 0;  ///< of the optimizer's step
  SolverOptions solver = {};
};

/// The micro-batch and the plan with which a whole step is fastest.
struct Choice {
  int64_t items = 0;          ///< in a micro-batch
  int64_t micro_batches = 1;  ///< in a step
  Solution plan = {};         ///< of a micro-batch
  int64_t peak_bytes = 0;     ///< predicted, of everything
  double seconds = 0;         ///< predicted, of the step

  /// The choice as JSON, from which seconds are read back bit for bit.
  std::string to_json() const;

  /// Reads a choice. Throws ConfigError if `text` is not a choice, or is a choice of another format version.
  static Choice from_json(std::string_view text);

  friend bool operator==(const Choice&, const Choice&) = default;
};

/// The result for a single candidate.
struct Considered {
  int64_t items = 0;
  int64_t micro_batches = 1;
  int64_t plain_peak_bytes = 0;  ///< of everything, with nothing rebuilt
  double plain_seconds = 0;
  double least_seconds = 0;  ///< of a plan that was found, or else a bound; infinite if nothing fits
  std::string verdict = {};

  /// A line for people, with `more` at the end.
  std::string row(std::string_view more = {}) const;
};

/// The result of search().
struct Search {
  std::optional<Choice> choice = {};        ///< empty if nothing fits
  int64_t smallest_feasible_bytes = 0;      ///< if nothing fits: the smallest budget for which a plan was found
  int64_t lower_bound_bytes = 0;            ///< if nothing fits: no plan of any candidate takes fewer bytes
  std::string least_is = {};                ///< if nothing fits: what is alive in smallest_feasible_bytes, in words
  std::vector<Considered> considered = {};  ///< in the order of their plain times

  /// A text for people: a line for each candidate, and how sure the choice is.
  std::string explain() const;
};

/// The fastest step within the budget. Of candidates that take at most kApart times as long, the candidate with the
/// fewest micro-batches is chosen, because measured times do not tell such candidates apart. A candidate is not solved
/// if bounds show that no plan fits, or that no plan that fits would be chosen.
///
/// Throws ConfigError:
///
/// - if `candidates` is empty;
/// - for a batch, or a candidate, of fewer than 1 items;
/// - for a candidate without a simulator.
Search search(const std::vector<Candidate>& candidates, const SearchOptions& options);

}  // namespace snug::plan
