#pragma once
// Steps of random models under a plan, from the same parameters, gradients, buffers and generators each time.

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "snug/plan.h"
#include "snug/state.h"
#include "src/remat/activation_plan.h"
#include "tests/support/random_model.h"
#include "tests/support/tensors.h"

namespace snug::testing {

/// Any plan, as it would be read from a file; none if it cannot be executed.
inline std::optional<ActivationPlan> plan_of(const plan::Simulator& simulator, const plan::Stays& stays) {
  const plan::Simulation run = simulator.run(stays);
  if (run.impossible >= 0) {
    return std::nullopt;
  }
  const plan::Solution plan{.stays = stays, .peak_bytes = run.peak_bytes, .seconds = run.seconds};
  return ActivationPlan::from_json(R"({"plan":)" + plan.to_json() + R"(,"profile":)" + simulator.profile().to_json() +
                                   "}");
}

struct Outcome {
  torch::Tensor loss;
  std::vector<torch::Tensor> gradients, buffers;
  RngState generators;
  int64_t peak_bytes;
  int64_t replayed = 0;  // operators
};

inline void expect_same(const Outcome& a, const Outcome& b) {
  EXPECT_TRUE(torch::equal(a.loss, b.loss));
  EXPECT_TRUE(same_bits(a.gradients, b.gradients));
  EXPECT_TRUE(same_bits(a.buffers, b.buffers));
  EXPECT_TRUE(a.generators == b.generators);
}

class Step {
 public:
  explicit Step(const RandomModel& model) : model_(model), buffers_(clones_of(model.module->buffers())) { reset(); }

  std::function<torch::Tensor()> forward() const {
    return [this] { return model_.loss(model_.input); };
  }

  Outcome run(const std::optional<ActivationPlan>& plan) {
    reset();
    const MemoryMeter meter(model_.input.device());
    std::optional<Rematerialize> scope;
    if (plan) {
      scope.emplace(*plan);
    }
    torch::Tensor loss = model_.loss(model_.input);
    auto replayed = std::make_shared<const std::atomic<int64_t>>(0);
    if (scope) {
      EXPECT_EQ(scope->deviation(), "");
      replayed = scope->replayed_operators();
      scope.reset();
    }
    loss.backward();
    const int64_t peak = meter.report().peak_bytes;
    return {
        loss.detach(),   gradients_of(model_.leaves()), clones_of(model_.module->buffers()), RngState::capture(), peak,
        replayed->load()};
  }

  void reset() {
    torch::NoGradGuard no_grad;
    for (torch::Tensor& leaf : model_.leaves_) {
      leaf.mutable_grad() = torch::Tensor();
    }
    const auto buffers = model_.module->buffers();
    for (size_t i = 0; i < buffers.size(); ++i) {
      overwrite(buffers[i], buffers_[i]);
    }
    model_.kept->clear();  // a prediction is for steps that begin without them
    torch::manual_seed(1);
  }

 private:
  struct Model : RandomModel {
    explicit Model(const RandomModel& model) : RandomModel(model), leaves_(leaves()) {}
    std::vector<torch::Tensor> leaves_;
  } model_;
  std::vector<torch::Tensor> buffers_;
};

// The gradients of one forward pass, under a plan or not, with `backward` called on its loss.
inline std::vector<torch::Tensor> gradients(const RandomModel& model, Step& step,
                                            const std::optional<ActivationPlan>& plan,
                                            const std::function<void(torch::Tensor)>& backward) {
  step.reset();
  std::optional<Rematerialize> scope;
  if (plan) {
    scope.emplace(*plan);
  }
  const torch::Tensor loss = model.loss(model.input);
  if (scope) {
    EXPECT_EQ(scope->deviation(), "");
  }
  scope.reset();
  backward(loss);
  return gradients_of(model.leaves());
}

inline constexpr plan::SolverOptions kSearch{.work = 1'000'000};  // small models need little

// From which on a plan was found, in bytes.
inline Bytes smallest_feasible(const plan::Profile& profile) {
  try {
    detail::unverified_plan(profile, Bytes(1), kSearch);
  } catch (const BudgetExceeded& error) {
    return error.smallest_feasible();
  }
  ADD_FAILURE() << "a plan for one byte";
  return Bytes(1);
}

class OneThread {
 public:
  OneThread() { torch::set_num_threads(1); }
  ~OneThread() { torch::set_num_threads(threads_); }

 private:
  int threads_ = torch::get_num_threads();
};

// One for each kind of block; with SNUG_RANDOM_MODELS=300 that many.
inline uint64_t number_of_models() {
  const char* number = std::getenv("SNUG_RANDOM_MODELS");
  return number == nullptr ? random_model_kinds().size() : std::stoull(number);
}

}  // namespace snug::testing
