#pragma once
// The random numbers of a part of the forward, such as a checkpointed region, for running the part again with the same
// numbers. The generator of each random operator is noted. A second run therefore does not touch the process's
// generators, and other threads may draw from the generators at any time. Other moves of the default generators (by a
// kernel outside of operators, by manual_seed) look like moves by other threads. Only if the program says that other
// moves belong to the part, the generators are set back to their states in the forward, until the next operator draws.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>

#include <ATen/core/Generator.h>

#include "snug/state.h"
#include "src/activations/operator_traits.h"
#include "src/activations/region_values.h"
#include "src/memory/operator_mode.h"

namespace snug::detail {

struct RegionDraws {
  struct Draw {
    at::Generator from;
    size_t number;  // the number of draws before
  };
  explicit RegionDraws(bool with_unseen) : repeats_unseen(with_unseen) {}

  bool repeats_unseen;                       // repeat draws outside of operators
  std::unordered_map<uint64_t, Draw> draws;  // by operator, sizes of its operands, and number among alike calls
  bool has_moved = false;                    // the default generators moved without a draw of an operator
  std::map<size_t, RngState> moved;          // if repeats_unseen: the generators' states, by the number of draws before
};

/// Fills a RegionDraws during the first run of the part.
class ForwardDraws final : public OperatorPolicy {
 public:
  explicit ForwardDraws(RegionDraws& record) : record_(record), after_last_(RngState::capture()) {}
  void call(const OperatorCall& call, Stack& stack) override;
  /// Notes whether the default generators have moved since the last draw.
  void note_if_moved();

 private:
  RegionDraws& record_;
  CallKeys keys_;
  RngState after_last_;
};

/// Draws the numbers of a RegionDraws again, in the recomputation.
class RecomputeDraws final : public OperatorPolicy {
 public:
  using Draw = RegionDraws::Draw;

  explicit RecomputeDraws(const RegionDraws& record);
  void call(const OperatorCall& call, Stack& stack) override;
  /// The next call draws. Returns the call's draw in the forward, or null if the call drew nothing in the forward.
  const Draw* next(const c10::OperatorHandle& op, const Arguments& arguments);
  void run(const OperatorCall& call, Stack& stack, const Draw* draw);
  /// The operator does not run, because its result was kept.
  void pass_over(const Draw* draw);

 private:
  void set_back_if_moved(const Draw* after);

  const RegionDraws& record_;
  CallKeys keys_;
  size_t place_ = 0;               // draws so far
  std::optional<RngGuard> guard_;  // open while the default generators are set back
};

}  // namespace snug::detail
