// PPO: several epochs over each rollout, which end early once the policy has moved too far: forward decides. The plain
// loop, and the same loop by one Stepper within 60 % of the plain loop's memory: the same bits, and the same stops.

#include <algorithm>
#include <cmath>
#include <iostream>
#include <vector>

#include <snug/snug.h>

namespace {

using torch::Tensor;
using torch::optim::Adam;
using torch::optim::AdamOptions;
namespace nn = torch::nn;

constexpr int64_t kGames = 256, kMoves = 16, kParts = 2, kRollouts = 3, kEpochs = 4, kWidth = 96;
constexpr double kMostKl = 0.02, kShare = 0.6;

nn::Sequential mlp(int64_t from, int64_t to) {
  nn::Sequential model(nn::Linear(from, kWidth), nn::Tanh());
  for (int layer = 0; layer < 3; ++layer) {
    model->push_back(nn::Linear(kWidth, kWidth));
    model->push_back(nn::Tanh());
  }
  model->push_back(nn::Linear(kWidth, to));
  return model;
}

struct PolicyImpl : nn::Module {
  PolicyImpl() {
    actor = register_module("actor", mlp(2, 3));
    critic = register_module("critic", mlp(2, 1));
  }
  Tensor log_odds(const Tensor& seen) { return actor->forward(seen).log_softmax(1); }
  Tensor value(const Tensor& seen) { return critic->forward(seen).squeeze(1); }
  nn::Sequential actor{nullptr}, critic{nullptr};
};
TORCH_MODULE(Policy);

// Many games at once: a push to the left, none, or to the right brings a moving point to 0. The batch: what was seen,
// the move, the move's log probability, and how much more the game gained than expected, from there on.
snug::Batch play(Policy& policy, int64_t rollout) {
  torch::manual_seed(100 + static_cast<uint64_t>(rollout));
  const torch::NoGradGuard no_grad;
  std::vector<Tensor> seen, moves, log_probs, rewards;
  Tensor place = torch::randn({kGames}), speed = torch::zeros({kGames});
  for (int64_t i = 0; i < kMoves; ++i) {
    seen.push_back(torch::stack({place, speed}, 1));
    const Tensor odds = policy->log_odds(seen.back());
    moves.push_back(odds.exp().multinomial(1));
    log_probs.push_back(odds.gather(1, moves.back()));
    speed = speed * 0.9 + (moves.back().squeeze(1) - 1) * 0.3;
    place = place + speed * 0.3;
    rewards.push_back(-place.abs());
  }
  Tensor gain = torch::zeros({kGames});
  for (size_t i = rewards.size(); i-- > 0;) {
    gain = rewards[i] + gain * 0.9;
    rewards[i] = gain;
  }
  const Tensor all = torch::cat(seen), gains = torch::cat(rewards);
  return {all, torch::cat(moves), torch::cat(log_probs).squeeze(1), gains, gains - policy->value(all)};
}

// A part of the rollout, in an order of the epoch's own.
snug::Batch part_of(const snug::Batch& rollout, const Tensor& order, int64_t part) {
  const Tensor rows = order.chunk(kParts)[static_cast<size_t>(part)];
  std::vector<Tensor> tensors;
  for (const Tensor& tensor : rollout.tensors()) {
    tensors.push_back(tensor.index_select(0, rows));
  }
  return snug::Batch(tensors);
}

struct Scores {
  Tensor loss, kl;  // kl: how far the policy has moved since the rollout
};

// Advantages are compared with each other, so the loss is one of the whole part.
Scores scores(Policy& policy, const snug::Batch& part) {
  const Tensor odds = policy->log_odds(part[0]);
  const Tensor moved = odds.gather(1, part[1]).squeeze(1) - part[2];
  const Tensor advantage = (part[4] - part[4].mean()) / (part[4].std() + 1e-8);
  const Tensor ratio = moved.exp();
  const Tensor gained = torch::min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean();
  const Tensor entropy = -(odds.exp() * odds).sum(1).mean();
  const Tensor loss = 0.5 * (policy->value(part[0]) - part[3]).square().mean() - gained - 0.01 * entropy;
  return {loss, (ratio.detach() - 1 - moved.detach()).mean()};
}

struct Trained {
  std::vector<Tensor> tensors;
  std::vector<double> losses;  // of the updates that were made
  snug::Bytes peak{0};         // of everything that the loop allocates
};

// loop: plain
Trained train_plainly() {
  torch::manual_seed(1);
  const snug::MemoryMeter meter;
  Policy policy;
  Adam optimizer(policy->parameters(), AdamOptions(2e-3));
  std::vector<double> losses;
  for (int64_t i = 0; i < kRollouts; ++i) {
    const snug::Batch rollout = play(policy, i);
    bool stops = false;
    for (int64_t epoch = 0; epoch < kEpochs && !stops; ++epoch) {
      const Tensor order = torch::randperm(rollout.size());
      for (int64_t part = 0; part < kParts && !stops; ++part) {
        optimizer.zero_grad();
        const Scores of = scores(policy, part_of(rollout, order, part));
        stops = of.kl.item<double>() > kMostKl;
        if (!stops) {
          of.loss.backward();
          nn::utils::clip_grad_norm_(policy->parameters(), 0.5);
          optimizer.step();
          losses.push_back(of.loss.item<double>());
        }
      }
    }
  }
  return {policy->parameters(), losses, snug::Bytes(meter.report().peak_bytes)};
}

// loop: snug
Trained train_within(snug::Bytes budget) {
  torch::manual_seed(1);
  const snug::MemoryMeter meter;
  Policy policy;
  Adam optimizer(policy->parameters(), AdamOptions(2e-3));
  snug::Stepper stepper(
      policy, optimizer,
      {.clip_norm = 0.5, .budget = {.memory = budget}, .accept_update = [](const snug::StepResult& result) {
         return !(result.metric("kl") > kMostKl);
       }});
  std::vector<double> losses;
  for (int64_t i = 0; i < kRollouts; ++i) {
    const snug::Batch rollout = play(policy, i);
    bool stops = false;
    for (int64_t epoch = 0; epoch < kEpochs && !stops; ++epoch) {
      const Tensor order = torch::randperm(rollout.size());
      for (int64_t part = 0; part < kParts && !stops; ++part) {
        const auto result = stepper.step(part_of(rollout, order, part), [&](const snug::Batch& batch) {
          const Scores of = scores(policy, batch);
          return snug::Loss::whole(of.loss).with("kl", of.kl);
        });
        stops = result.metric("kl") > kMostKl;
        if (!stops) {
          losses.push_back(result.loss());
        }
      }
    }
  }
  return {policy->parameters(), losses, snug::Bytes(meter.report().peak_bytes)};
}
// loop: end

}  // namespace

int main() {
  const Trained plain = train_plainly();
  const Trained planned = train_within(snug::live_bytes(torch::kCPU) + plain.peak * kShare);
  const bool same = planned.losses == plain.losses &&
                    std::ranges::equal(planned.tensors, plain.tensors, [](auto& a, auto& b) { return a.equal(b); });
  const bool stopped = plain.losses.size() < kRollouts * kEpochs * kParts;
  std::cout << "ppo: plain peak " << plain.peak.str() << ", planned peak " << planned.peak.str()
            << (same ? ", the same bits" : ", other bits") << ", " << plain.losses.size() << " updates of "
            << kRollouts * kEpochs * kParts << "\n";
  return same && stopped && planned.peak <= plain.peak * kShare ? 0 : 1;
}
