#pragma once
// OtherState: what a language that snug is bound to keeps beside tensors' memory, and planning puts back.

#include <any>
#include <functional>

namespace snug {

/// In Python: `random`, numpy.random, and which tensors are the buffers of modules. `capture` is called on the thread
/// of the step before it runs; what it returns is kept until nothing is put back any more. `restore` must not throw.
struct OtherState {
  std::function<std::any()> capture;
  std::function<void(const std::any&)> restore;
};
/// From now on what planning puts back includes it, in this process.
void set_other_state(OtherState state);
/// The one that was set; its functions are empty where none was.
const OtherState& other_state();

}  // namespace snug
