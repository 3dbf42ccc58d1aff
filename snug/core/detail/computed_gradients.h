#pragma once
// What snug's own custom Functions say of themselves, for those who hand out saved tensors (memory/detail/not_adopted.h).

#include <utility>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>

namespace snug::detail {

/// The custom Function whose backward runs, if it computes all that it returns: none of its saved tensors becomes a gradient as it is, so
/// nobody need copy them.
inline thread_local const torch::autograd::Node* computes_its_gradients = nullptr;

/// context->get_saved_variables(), of a Function that computes all that it returns.
inline torch::autograd::variable_list saved_for_computing(torch::autograd::AutogradContext* context) {
  struct Back {
    const torch::autograd::Node* before;
    ~Back() { computes_its_gradients = before; }
  } const back{std::exchange(computes_its_gradients, torch::autograd::get_current_node().get())};
  return context->get_saved_variables();
}

}  // namespace snug::detail
