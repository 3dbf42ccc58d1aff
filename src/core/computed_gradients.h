#pragma once
// A mark of snug's own custom Functions that compute every gradient that the Functions return. The mark is for the code
// that hands out saved tensors (memory/not_adopted.h).

#include <utility>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>

namespace snug::detail {

/// The custom Function whose backward runs, if the Function computes every gradient that the Function returns. None of
/// the Function's saved tensors becomes a gradient unchanged, so the saved tensors need no copy.
inline thread_local const torch::autograd::Node* computes_its_gradients = nullptr;

/// context->get_saved_variables(), for a Function that computes every returned gradient.
inline torch::autograd::variable_list saved_for_computing(torch::autograd::AutogradContext* context) {
  struct Back {
    const torch::autograd::Node* before;
    ~Back() { computes_its_gradients = before; }
  } const back{std::exchange(computes_its_gradients, torch::autograd::get_current_node().get())};
  return context->get_saved_variables();
}

}  // namespace snug::detail
