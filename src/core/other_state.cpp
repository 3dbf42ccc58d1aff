#include "src/core/other_state.h"

#include <utility>

namespace snug::detail {
namespace {

// Never destroyed, because states may be restored at the program's end.
OtherState& the_other_state() {
  static auto& state = *new OtherState;
  return state;
}

}  // namespace

void set_other_state(OtherState state) { the_other_state() = std::move(state); }
const OtherState& other_state() { return the_other_state(); }

bool is_interrupt(const std::exception& error) {
  return other_state().is_interrupt && other_state().is_interrupt(error);
}

}  // namespace snug::detail
