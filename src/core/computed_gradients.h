#pragma once
// A mark by which snug's own custom Functions tell that they compute every gradient they return, for the code that
// hands out saved tensors (memory/not_adopted.h).

#include <utility>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>

namespace snug::detail {

/// The custom Function whose backward runs, if it computes every gradient that it returns. None of its saved tensors
/// then becomes a gradient as it is, so they need no copy.
inline thread_local const torch::autograd::Node* computes_its_gradients = nullptr;

/// context->get_saved_variables(), for a Function that computes every gradient that it returns.
inline torch::autograd::variable_list saved_for_computing(torch::autograd::AutogradContext* context) {
  struct Back {
    const torch::autograd::Node* before;
    ~Back() { computes_its_gradients = before; }
  } const back{std::exchange(computes_its_gradients, torch::autograd::get_current_node().get())};
  return context->get_saved_variables();
}

}  // namespace snug::detail
