#pragma once
// What a random operator draws from. Where a policy wants to know it, the operator draws from a copy of the generator, which then takes the
// program's place: so what it drew from is known exactly, whatever other threads draw meanwhile. And it can draw the same again without the
// program's generator, which others draw from.

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/FunctionRef.h>

namespace snug::detail {

/// Of one call of an operator; policies fill it in before the call and read it after.
struct RandomDraw {
  /// What to draw from, as it is, instead of what the program gave the operator or, if it gave none, the default generator of its device.
  /// Stays as it is, as do the program's generators.
  at::Generator from = {};
  /// Whether `before` is wanted.
  bool is_noted = false;
  /// What it drew from, as it was before. To be copied, not drawn from. Undefined where there is no generator, as on a meta device.
  at::Generator before = {};

  using Kernel = c10::function_ref<void(const c10::OperatorHandle&)>;
  /// Runs a random operator: calls `kernel` with it, or its twin that takes a generator, and the arguments on the stack.
  void run(const c10::OperatorHandle& op, torch::jit::Stack& stack, Kernel kernel);
};

/// A copy of what it would draw from by itself. Undefined where there is no generator.
at::Generator copy_of_programs_generator(const c10::OperatorHandle& op, const torch::jit::Stack& stack);

/// Whether an operator with the same operands and RandomDraw::from does the same: one of LibTorch's, or one that takes a generator. Others
/// may draw from elsewhere.
bool draws_the_same_again(const c10::OperatorHandle& op);

}  // namespace snug::detail
