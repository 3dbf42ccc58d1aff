#pragma once
// Another thread that draws from the default generator at the worst moments, as a data loader does by chance: right before and right after each
// random operator of the thread that makes this. The same numbers come out in each run.

#include <thread>

#include <torch/csrc/autograd/graph_task.h>
#include <torch/torch.h>

#include "snug/activations/detail/operator_traits.h"
#include "snug/memory/detail/operator_mode.h"

namespace snug::testing {

class DrawingThread final : public detail::OperatorPolicy {
 public:
  enum class When { Forward, Always };
  explicit DrawingThread(When when) : when_(when) {}

  void call(const detail::OperatorCall& call, detail::Stack& stack) override {
    const bool is_its_turn = detail::traits_of(call.op).is_random &&
                             (when_ == When::Always || torch::autograd::get_current_graph_task_id() < 0);
    draw_if(is_its_turn);
    call.proceed(stack);
    draw_if(is_its_turn);
  }
  int64_t draws() const { return draws_; }
  static void draw() { torch::rand({3}); }

 private:
  void draw_if(bool is_its_turn) {
    if (is_its_turn) {
      std::thread(draw).join();
      ++draws_;
    }
  }

  When when_;
  int64_t draws_ = 0;
  detail::OperatorScope scope_{*this};  // outside of all scopes to come
};

}  // namespace snug::testing
