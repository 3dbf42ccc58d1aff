#pragma once
// The life of a plan
//
// Trials propose a plan, or a file does; the first step under the plan proves the plan. Events in a step may put the
// plan in doubt. A new plan costs trials in the middle of training, and may come to another micro-batch with other
// bits. The old plan may fail in each step. Between the two, the same plan with more memory left free is a third
// answer. The table of next_of() chooses an answer for each event.
//
// Reasons:
// - Nobody in this program has tried a plan from a file, so nothing about such a plan is trusted.
// - Operators that differ from step to step, as with dropped layers, do no harm to a step that fits: from the first
//   different operator on, everything is kept.
// - Results larger than planned, as when the data route rows to experts, do no harm to a step that fits. On a CPU the
//   tape evicts kept results for them (TapeReplays::evict), so the step fits with the plan as it is.
// - A step with other operators fits by eviction, too. Evictions cost more time than a plan for these operators would,
//   so a new plan is made. Operators may differ in every step, as the number of a recurrent network's time steps does.
//   So the 1st, 4th, 16th, 64th, ... of these steps asks for a new plan.
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
  Made,             ///< as planned
  MadeOtherwise,    ///< with other operators
  MadeByEviction,   ///< with other operators, and by evictions, in a step after which a new plan is due
  NoRoom,           ///< out of memory, as planned
  NoRoomOtherwise,  ///< out of memory, with other operators
  NoRoomLarger,     ///< out of memory, with larger results, or with everything kept, when nobody compares operators
};

enum class PlanNext : uint8_t { Prove, LeaveMoreFree, PlanAnew };

/// What follows from an event. PlanAnew: the plan is made again.
constexpr PlanNext next_of(PlanState state, PlanEvent event) {
  using enum PlanNext;
  constexpr PlanNext kTable[][3] = {
      // Read, Tried, Proven
      {Prove, Prove, Prove},                     // Made
      {PlanAnew, Prove, Prove},                  // MadeOtherwise
      {PlanAnew, PlanAnew, PlanAnew},            // MadeByEviction
      {PlanAnew, LeaveMoreFree, LeaveMoreFree},  // NoRoom
      {PlanAnew, PlanAnew, PlanAnew},            // NoRoomOtherwise
      {PlanAnew, LeaveMoreFree, PlanAnew},       // NoRoomLarger
  };
  return kTable[static_cast<size_t>(event)][static_cast<size_t>(state)];
}

}  // namespace snug::detail
