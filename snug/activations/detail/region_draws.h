#pragma once
// The random numbers of a part of the forward, such as a checkpointed region, for running it again with the same. What each operator drew from
// is noted, so that the process's generators are not touched when it runs again, and other threads may draw from them at any time. What else moves the
// default generators (a kernel that is no operator, manual_seed) cannot be told from other threads. So where they moved between two draws, they are
// put where they were then until the second draw comes.

#include <cstddef>
#include <map>
#include <optional>
#include <vector>

#include <ATen/core/Generator.h>

#include "snug/core/rng.h"
#include "snug/memory/detail/operator_mode.h"

namespace snug::detail {

struct RegionDraws {
  struct Draw {
    c10::OperatorHandle op;
    at::Generator from;
  };
  std::vector<Draw> draws;           // in order
  std::map<size_t, RngState> moved;  // the default generators after so many draws, where they then moved without one
};

/// While the part runs for the first time: fills a RegionDraws.
class ForwardDraws final : public OperatorPolicy {
 public:
  explicit ForwardDraws(RegionDraws& record) : record_(record), after_last_(RngState::capture()) {}
  void call(const OperatorCall& call, Stack& stack) override;
  /// It is over.
  void close() { note_if_moved(); }

 private:
  void note_if_moved();

  RegionDraws& record_;
  RngState after_last_;
};

/// While it runs again.
class RecomputeDraws final : public OperatorPolicy {
 public:
  explicit RecomputeDraws(const RegionDraws& record);
  void call(const OperatorCall& call, Stack& stack) override;
  /// An operator that would draw does not run, since its result is there.
  void pass_over(const c10::OperatorHandle& op);

 private:
  const RegionDraws::Draw* find_next(const c10::OperatorHandle& op);
  void set_back_if_moved();

  const RegionDraws& record_;
  size_t place_ = 0;               // draws so far
  std::optional<RngGuard> guard_;  // where the default generators are drawn from
};

}  // namespace snug::detail
