#pragma once
// OtherState: state that a language with bindings to snug keeps beside the memory of tensors. Planning restores
// OtherState.

#include <any>
#include <exception>
#include <functional>

namespace snug::detail {

/// State of another language. In Python: `random`, numpy.random, and the identity of the tensors that are buffers of
/// modules. `capture` is called on the thread of the step before the step runs; the result of `capture` is kept until
/// nothing more can be restored. `restore` must not throw. `is_interrupt`: see below.
struct OtherState {
  std::function<std::any()> capture;
  std::function<void(const std::any&)> restore;
  std::function<bool(const std::exception&)> is_interrupt;
};
/// From now on, planning in this process also restores `state`.
void set_other_state(OtherState state);
/// The OtherState set last; the functions are empty if no OtherState was set.
const OtherState& other_state();

/// Whether the exception asks the program to stop, as KeyboardInterrupt of Python does. Planning takes no such
/// exception for a failure of a trial.
bool is_interrupt(const std::exception& error);

}  // namespace snug::detail
