#pragma once
// Another thread that draws from the default generator at the worst moments, as a data loader does by chance: right
// before and right after each random operator, or each operator, of the thread that makes this. The same numbers come
// out in each run.

#include <thread>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/graph_task.h>
#include <torch/torch.h>

#include "src/activations/operator_traits.h"
#include "src/memory/operator_mode.h"

namespace snug::testing {

class DrawingThread final : public detail::OperatorPolicy {
 public:
  enum class When { Forward, Always, AtEveryOperator };
  explicit DrawingThread(When when) : when_(when) {}

  void call(const detail::OperatorCall& call, detail::Stack& stack) override {
    const bool is_its_turn =
        when_ == When::AtEveryOperator || (detail::traits_of(call.op).is_random &&
                                           (when_ == When::Always || torch::autograd::get_current_graph_task_id() < 0));
    draw_if(is_its_turn);
    call.proceed(stack);
    draw_if(is_its_turn);
  }
  /// Since the last call of this.
  std::vector<torch::Tensor> take_numbers() { return std::exchange(numbers_, {}); }
  static torch::Tensor draw() { return torch::rand({3}); }

 private:
  void draw_if(bool is_its_turn) {
    if (is_its_turn) {
      std::thread([this] { numbers_.push_back(draw()); }).join();
    }
  }

  When when_;
  std::vector<torch::Tensor> numbers_;
  detail::OperatorScope scope_{*this};  // outside of all scopes to come
};

}  // namespace snug::testing
