// A custom Function may return a tensor that it saved as the gradient of another. Autograd takes a gradient that nobody
// else holds for its own, and adds to it: that must not reach what a policy gives out again, to another node or in
// another backward pass.

#include <any>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/checkpoint.h"
#include "snug/memory.h"
#include "snug/offload.h"
#include "snug/plan.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"
#include "tests/support/planned_step.h"
#include "tests/support/tensors.h"

namespace snug::saved_as_gradient_test {
namespace {

using testing::same_bits;
using testing::smallest_feasible;
using torch::Tensor;

struct Times : torch::autograd::Function<Times> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& factor) {
    context->save_for_backward({factor});
    return (x * factor).sum();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list&) {
    return {context->get_saved_variables()[0], Tensor()};
  }
};

struct Parameters {
  Tensor a = torch::ones({64, 64}, torch::requires_grad());
  Tensor b = torch::ones({64, 64}, torch::requires_grad());
  Tensor c = torch::ones({64, 64});

  // Backward goes from the last to the first: `a` has the saved tensor for its gradient, to which more is added, before
  // `b` asks for it.
  Tensor loss() const {
    const Tensor factor = c * 3;
    const Tensor first = Times::apply(b, factor);
    const Tensor second = (a * 2).sum();
    return Times::apply(a, factor) + second + first;
  }
};

struct Policy {
  std::string name;
  std::function<Tensor(const Parameters&)> loss;
};

std::vector<Policy> policies() {
  return {{"Plain", [](const Parameters& p) { return p.loss(); }},
          {"Meter",
           [](const Parameters& p) {
             const MemoryMeter meter;
             return p.loss();
           }},
          {"Hooks",
           [](const Parameters& p) {
             const SavedTensorHooks hooks([](const Tensor& t) { return std::any(t.detach()); },
                                          [](std::any& kept) { return std::any_cast<Tensor&>(kept); });
             return p.loss();
           }},
          {"SaveOnHost",
           [](const Parameters& p) {
             const SaveOnHost scope({.min_bytes = Bytes(1)});
             return p.loss();
           }},
          {"Checkpoint",
           [](const Parameters& p) {
             return checkpoint([p](const Tensor&, const Tensor&) { return p.loss(); }, p.a, p.b);
           }},
          {"Rematerialize",
           [](const Parameters& p) {
             const plan::Profile profile = detail::profile_step([&] { return p.loss(); });
             const Rematerialize scope(detail::unverified_plan(profile, smallest_feasible(profile)));
             return p.loss();
           }},
          {"RematerializeKeepingAll", [](const Parameters& p) {
             const plan::Profile profile = detail::profile_step([&] { return p.loss(); });
             const Rematerialize scope(detail::unverified_plan(profile, Bytes::unlimited()));
             return p.loss();
           }}};
}

class SavedAsGradient : public ::testing::TestWithParam<Policy> {};

TEST_P(SavedAsGradient, IsNotWhatThePolicyGivesOutAgain) {
  const Parameters parameters;
  const Tensor loss = GetParam().loss(parameters);
  for (int pass = 1; pass <= 3; ++pass) {
    SCOPED_TRACE(pass);
    loss.backward({}, /*retain_graph=*/pass < 3);
    EXPECT_NE(parameters.a.grad().const_data_ptr(), parameters.b.grad().const_data_ptr());
    EXPECT_TRUE(same_bits(parameters.a.grad(), torch::full({64, 64}, 5.0f * static_cast<float>(pass))));
    EXPECT_TRUE(same_bits(parameters.b.grad(), torch::full({64, 64}, 3.0f * static_cast<float>(pass))));
  }
}

INSTANTIATE_TEST_SUITE_P(, SavedAsGradient, ::testing::ValuesIn(policies()),
                         [](const auto& test) { return test.param.name; });

// As a compiled region does: it saves what it has computed inside, and writes to that in backward.
struct Region : torch::autograd::Function<Region> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    const Tensor inside = x.tanh(), last = inside.sin();
    context->save_for_backward({inside, last});
    return last * inside;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const Tensor inside = saved[0], by_last = saved[1].add_(inside * inside.cos());
    return {gradients[0] * by_last * (1 - inside * inside)};
  }
};

TEST(SavedByAFunction, IsHandedOverWithoutACopyWhereNobodyElseNeedsIt) {
  const Tensor x = torch::randn({256, 256}).requires_grad_();
  const auto forward = [&] {
    Tensor h = x;
    for (int i = 0; i < 4; ++i) {
      h = Region::apply(h.exp());
    }
    return h.sum();
  };
  const auto trained = [&](const std::optional<ActivationPlan>& plan) {
    const MemoryMeter meter;
    Tensor loss;
    {
      std::optional<Rematerialize> scope;
      if (plan) {
        scope.emplace(*plan);
      }
      loss = forward();
    }
    const Tensor gradient = torch::autograd::grad({loss}, {x})[0];
    return std::pair(gradient, meter.report().peak_bytes);
  };
  const auto [plain, plain_peak] = trained(std::nullopt);
  const ActivationPlan plan = plan_activations(forward, Bytes::unlimited());
  const auto [planned, planned_peak] = trained(plan);
  EXPECT_TRUE(same_bits(planned, plain));
  EXPECT_EQ(planned_peak, plan.predicted_peak_bytes);
  EXPECT_LE(planned_peak, plain_peak);
  const plan::Profile profile = detail::profile_step(forward);
  const ActivationPlan smallest = detail::unverified_plan(profile, smallest_feasible(profile));
  const auto [rebuilt, smallest_peak] = trained(smallest);
  EXPECT_TRUE(same_bits(rebuilt, plain));
  EXPECT_LE(smallest_peak, smallest.predicted_peak_bytes);
}

}  // namespace
}  // namespace snug::saved_as_gradient_test
