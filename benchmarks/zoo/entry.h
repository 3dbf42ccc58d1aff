#pragma once
// An entry of the zoo: a model as its user would write it, a batch, and a loss. Seeds are fixed, so each one that is
// made has the same bits.

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

namespace snug::zoo {

using torch::Tensor;

/// A part of a model takes what the part before it gave.
using State = std::vector<Tensor>;
using Part = std::function<State(State)>;
using Parts = std::vector<Part>;
/// Runs parts one after the other, in a way of its own.
using Run = std::function<State(const Parts&, State)>;
using Batch = std::vector<Tensor>;

struct Entry {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
  Batch batch;
  /// A scalar. A model that is a sequence of parts, or that has one in it, has it run by `run`.
  std::function<Tensor(const Batch& batch, const Run& run)> loss_of;
  /// The loss is a mean over the items, which the first dimension of the batch's tensors counts.
  bool splits_over_batch = true;
};

struct Species {
  std::string name;
  std::function<Entry()> make;
};

inline State run_plainly(const Parts& parts, State state) {
  for (const Part& part : parts) {
    state = part(std::move(state));
  }
  return state;
}

}  // namespace snug::zoo
