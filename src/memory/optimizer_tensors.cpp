#include "src/memory/optimizer_tensors.h"

#include <variant>

#include <torch/optim.h>

#include "snug/state.h"
#include "snug/stateful_optimizer.h"

namespace snug::detail {
namespace {

void collect(const StateDict& state, std::vector<at::Tensor>& tensors) {
  for (const StateEntry& entry : state.entries()) {
    if (const auto* tensor = std::get_if<at::Tensor>(&entry.value)) {
      tensors.push_back(*tensor);
    } else if (const auto* inner = std::get_if<StateDict>(&entry.value)) {
      collect(*inner, tensors);
    }
  }
}

// Each of torch's optimizers keeps its tensors in a type of its own, and torch has no common way to list the tensors.
void collect(torch::optim::OptimizerParamState& state, std::vector<at::Tensor>& tensors) {
  using namespace torch::optim;
  if (auto* sgd = dynamic_cast<SGDParamState*>(&state)) {
    tensors.push_back(sgd->momentum_buffer());
  } else if (auto* adam = dynamic_cast<AdamParamState*>(&state)) {
    tensors.insert(tensors.end(), {adam->exp_avg(), adam->exp_avg_sq(), adam->max_exp_avg_sq()});
  } else if (auto* adamw = dynamic_cast<AdamWParamState*>(&state)) {
    tensors.insert(tensors.end(), {adamw->exp_avg(), adamw->exp_avg_sq(), adamw->max_exp_avg_sq()});
  } else if (auto* rms = dynamic_cast<RMSpropParamState*>(&state)) {
    tensors.insert(tensors.end(), {rms->square_avg(), rms->momentum_buffer(), rms->grad_avg()});
  } else if (auto* adagrad = dynamic_cast<AdagradParamState*>(&state)) {
    tensors.push_back(adagrad->sum());
  } else if (auto* lbfgs = dynamic_cast<LBFGSParamState*>(&state)) {
    tensors.insert(tensors.end(), {lbfgs->d(), lbfgs->H_diag(), lbfgs->prev_flat_grad()});
    for (const auto* history : {&lbfgs->old_dirs(), &lbfgs->old_stps()}) {
      tensors.insert(tensors.end(), history->begin(), history->end());
    }
  }
}

}  // namespace

std::vector<at::Tensor> state_tensors(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> tensors;
  if (const auto* stateful = dynamic_cast<const StatefulOptimizer*>(&optimizer)) {
    collect(stateful->state_here(), tensors);
  } else {
    for (const auto& [parameter, state] : optimizer.state()) {
      collect(*state, tensors);
    }
  }
  return tensors;
}

}  // namespace snug::detail
