#pragma once
// The generator from which a random operator draws. If a policy asks for the generator, the operator draws from a copy
// of the program's generator, and the program's generator then takes the state of the copy. Two facts follow:
// - The state from which the operator drew is known exactly, however many numbers other threads draw at the same time.
// - The operator can repeat the draws without the program's generator, which other threads use.

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>

namespace snug::detail {

/// The generators of a call of an operator. Policies set members before the call and read members after the call.
struct RandomDraw {
  /// If defined, the operator draws from the state of `from`. If undefined, the operator draws from the generator given
  /// by the program or, without a given generator, from the default generator of the operator's device. With a defined
  /// `from`, the call changes neither `from` nor the program's generators.
  at::Generator from = {};
  /// Set `is_noted` to get `before`.
  bool is_noted = false;
  /// The operator's generator, in the state before the call. Copy `before`; do not draw from `before`. Undefined if the
  /// device has no generator, as on a meta device.
  at::Generator before = {};

  using Kernel = c10::function_ref<void(const c10::OperatorHandle&)>;
  /// Runs a random operator: calls `kernel` with the arguments on the stack and either the operator itself or the
  /// operator's twin with a generator argument.
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack, Kernel kernel);
};

/// Whether an operator repeats its results from the same operands and RandomDraw::from. True for LibTorch's operators
/// and for operators with a generator argument. Other operators may draw from elsewhere.
bool draws_the_same_again(const c10::OperatorHandle& op);

}  // namespace snug::detail
