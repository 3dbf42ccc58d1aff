#pragma once
// The life of a plan
//
// Trials propose a plan, or a file does; the first step under the plan proves the plan. Events in a step may put the
// plan in doubt. A new plan costs trials in the middle of training, and may come to another micro-batch with other
// bits. The old plan may fail in each step. Between the two, the same plan with more memory left free is a third
// answer. The table chooses an answer for each event:
//
//   event \ state                       Read        Tried            Proven
//   made as planned                     Proven      Proven           Proven
//   made, with other operators          plan again  Proven           Proven
//   out of memory, as planned           plan again  leave more free  leave more free
//   out of memory, other operators      plan again  plan again       plan again
//   out of memory, keeps everything     plan again  leave more free  plan again
//
// Reasons:
// - Nobody in this program has tried a plan from a file, so nothing about such a plan is trusted.
// - Operators that differ from step to step, as with dropped layers, do no harm to a step that fits: from the first
//   different operator on, everything is kept.
// - Results larger than planned, as when the data route rows to experts, count as planned: larger results need more
//   room, and no other plan.
// - Nobody compares the operators of a plan that keeps everything. If such a plan was proven, and a later step runs out
//   of memory, the later step is a larger step.
//
// If leaving more free is not enough, a new plan is made, once in a step. Another mode, precision or set of trained
// parameters makes another kind of step (StepKind), with a plan of its own. If another rank cuts its share into smaller
// parts, this rank chooses again among the micro-batches that were tried (StepPlanner::plan).

#include <cstddef>
#include <cstdint>

namespace snug::detail {

enum class PlanState : uint8_t { Read, Tried, Proven };

enum class PlanEvent : uint8_t {
  Made,
  MadeOtherwise,    ///< with other operators
  NoRoom,           ///< out of memory, as planned or with larger results
  NoRoomOtherwise,  ///< out of memory, with other operators
  NoRoomKeptAll,    ///< out of memory; nobody has compared operators
};

enum class PlanNext : uint8_t { Prove, LeaveMoreFree, PlanAnew };

/// The table above.
constexpr PlanNext next_of(PlanState state, PlanEvent event) {
  using enum PlanNext;
  constexpr PlanNext kTable[][3] = {
      {Prove, Prove, Prove},
      {PlanAnew, Prove, Prove},
      {PlanAnew, LeaveMoreFree, LeaveMoreFree},
      {PlanAnew, PlanAnew, PlanAnew},
      {PlanAnew, LeaveMoreFree, PlanAnew},
  };
  return kTable[static_cast<size_t>(event)][static_cast<size_t>(state)];
}

}  // namespace snug::detail
