#pragma once
// The life of a plan. Trials propose it, or a file does; the first step that is made under it proves it. What happens
// in a step may put it in doubt:
//
//   event \ state                       Read        Tried            Proven
//   made as planned                     Proven      Proven           Proven
//   made, with other operators          plan anew   Proven           Proven
//   out of memory, as planned           plan anew   leave more free  leave more free
//   out of memory, other operators      plan anew   plan anew        plan anew
//   out of memory, keeps everything     plan anew   leave more free  plan anew
//
// A plan from a file was tried by nobody here, so it is not trusted with anything. Operators that differ from step to
// step, as with layers that are dropped, do not make a step that fits wrong: from the first that differs everything is
// kept. Results that are larger than planned for, as where the data route rows to experts, are as planned: they need
// more room and no other plan. Nobody compares the operators of a plan that keeps everything: where it was proven, and
// a later step runs out of memory, that step is a larger one.
//
// Where leaving more free does not do, the plan is made anew, once in a step. Another mode, precision or set of trained
// parameters is another kind of step, with a plan of its own (StepKind). Another rank that cuts its share into smaller
// parts has this one choose again among what was tried (StepPlanner::plan).

#include <cstddef>
#include <cstdint>

namespace snug::detail {

enum class PlanState : uint8_t { Read, Tried, Proven };

enum class PlanEvent : uint8_t {
  Made,
  MadeOtherwise,    ///< with other operators
  NoRoom,           ///< out of memory, as planned, or with larger results
  NoRoomOtherwise,  ///< likewise; operators were others
  NoRoomKeptAll,    ///< likewise; nobody has compared operators
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
