#pragma once
// Policy gradient (REINFORCE, Williams 1992, with an entropy bonus) over a rollout in an environment of tensor
// operators.

#include "benchmarks/zoo/entry.h"

namespace snug::zoo {

/// A puck on a plane that is to be brought to the middle against the wind, by pushes in one of four directions or none.
class PuckPolicyImpl : public torch::nn::Module {
 public:
  explicit PuckPolicyImpl(int64_t width)
      : layers_(register_module("layers", torch::nn::Sequential(torch::nn::Linear(4, width), torch::nn::Tanh(),
                                                                torch::nn::Linear(width, width), torch::nn::Tanh(),
                                                                torch::nn::Linear(width, 5)))),
        pushes_(register_buffer("pushes", torch::tensor({{0, 0}, {1, 0}, {-1, 0}, {0, 1}, {0, -1}}, torch::kFloat))) {}

  /// places, winds: (puck, 2).
  Tensor loss(const Tensor& places, const Tensor& winds, const Run& run) {
    Parts parts;
    for (int64_t t = 0; t < kSteps; ++t) {
      parts.emplace_back([this, winds](const State& state) { return step(state, winds); });
    }
    const State end = run(parts, {places, torch::zeros_like(places)});
    std::vector<Tensor> log_probabilities, entropies, rewards;
    for (size_t i = 2; i < end.size(); i += 3) {
      log_probabilities.push_back(end[i]);
      entropies.push_back(end[i + 1]);
      rewards.push_back(end[i + 2]);
    }
    const Tensor to_come = torch::flip(torch::cumsum(torch::flip(torch::stack(rewards), {0}), 0), {0});
    const Tensor advantage = (to_come - to_come.mean(1, true)) / (to_come.std(1, true, true) + 1e-6);
    return -(torch::stack(log_probabilities) * advantage).mean() - 0.01 * torch::stack(entropies).mean();
  }

 private:
  // The state is place and speed, and of each step so far the log-probability of the push, the policy's entropy and the
  // reward.
  State step(State state, const Tensor& winds) {
    const Tensor log_policy = torch::log_softmax(layers_->forward(torch::cat({state[0], state[1]}, 1)), 1);
    const Tensor policy = log_policy.exp();
    Tensor action, reward;
    {
      const torch::NoGradGuard no_grad;
      action = torch::multinomial(policy, 1);
      state[1] = 0.95 * state[1] + 0.1 * (pushes_.index_select(0, action.squeeze(1)) + 0.3 * winds);
      state[0] = (state[0] + 0.1 * state[1]).clamp(-3, 3);
      reward = -state[0].square().sum(1);
    }
    state.push_back(log_policy.gather(1, action).squeeze(1));
    state.push_back(-(policy * log_policy).sum(1));
    state.push_back(reward);
    return state;
  }

  static constexpr int64_t kSteps = 56;
  torch::nn::Sequential layers_;
  Tensor pushes_;
};
TORCH_MODULE(PuckPolicy);

inline Entry make_rollout() {
  constexpr int64_t kPucks = 1024;
  torch::manual_seed(1);
  PuckPolicy policy(/*width=*/96);
  return {"rollout",
          policy.ptr(),
          {torch::randn({kPucks, 2}), torch::randn({kPucks, 2})},
          [policy](const Batch& batch, const Run& run) mutable { return policy->loss(batch[0], batch[1], run); }};
}

}  // namespace snug::zoo
