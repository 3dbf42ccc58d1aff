// Times of recomputation; see script/bench. Standard error has the GPT's bytes.
//
//   tiny_...               a region of one operator of one number
//   gpt_...                a GPT: plain; each block as a region, without and with kept matrix products; under plans
//   operators_...          1,000 small operators, plain and under a plan
//   search_48, curve_48    searches for a plan, and for ten plans

#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include <fmt/format.h>
#include <torch/torch.h>

#include "benchmarks/serve.h"
#include "program/measure/deep_models.h"
#include "program/measure/measure.h"
#include "program/measure/plans.h"
#include "snug/checkpoint.h"
#include "snug/memory.h"
#include "snug/plan.h"
#include "src/planner/curve.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"

namespace {

namespace measure = snug::measure;
using measure::DeepModel;
using measure::StepBytes;
using torch::Tensor;

// Forward and backward of one sine of one number.
template <class Call>
auto tiny(Call call) {
  return [call]() -> std::function<void()> {
    const Tensor x = torch::ones({1}, torch::requires_grad());
    return [=] { call(x).backward(); };
  };
}

// 12 blocks, d = 256, 4 x 256 tokens, FP32: forward and backward. In the order of benchmarks/peers/checkpointing.py.
struct GptStep {
  DeepModel model = measure::deep_gpt(/*layers=*/12, /*width=*/256, /*context=*/256, /*batch=*/4);
  Tensor tokens = model.input(model.batch);
  // Of the blocks; no options: the blocks are not checkpointed.
  std::optional<snug::CheckpointOptions> each_block = {};

  Tensor loss() const {
    return model.loss(tokens, [&](Tensor x) {
      return each_block ? measure::each_checkpointed(model.layers, std::move(x), *each_block)
                        : measure::in_order(model.layers, std::move(x));
    });
  }
  StepBytes bytes() const {
    return measure::bytes_of_step(model.parameters(), [&] { loss().backward(); });
  }
};

auto gpt(const std::string& name, const std::optional<snug::CheckpointOptions>& each_block) {
  return [=]() -> std::function<void()> {
    const auto step = std::make_shared<GptStep>();
    step->each_block = each_block;
    {
      const snug::MemoryMeter meter;
      const Tensor held = step->loss();
      std::fprintf(stderr, "%s: snug holds %.1f MiB for backward\n", name.c_str(),
                   static_cast<double>(meter.report().live_bytes) / (1 << 20));
    }
    return [step] {
      measure::drop_gradients(step->model.parameters());
      step->loss().backward();
    };
  };
}

// The same under a plan. `budget_of` tells the peak that the plan may reach, gradients included.
auto planned(const std::string& name, const std::function<int64_t(GptStep&)>& budget_of) {
  return [=]() -> std::function<void()> {
    const auto step = std::make_shared<GptStep>();
    const snug::Bytes budget(budget_of(*step));
    measure::drop_gradients(step->model.parameters());
    const snug::ActivationPlan plan = snug::plan_activations([&] { return step->loss(); }, budget);
    const auto forward = measure::under_plan([step] { return step->loss(); }, plan);
    const StepBytes bytes = measure::bytes_of_step(step->model.parameters(), [&] { forward().backward(); });
    fmt::print(stderr, "{}: peak {} bytes, predicted {}, allowed {}\n", name, bytes.peak, plan.predicted_peak_bytes,
               budget.count());
    return [step, forward] {
      measure::drop_gradients(step->model.parameters());
      forward().backward();
    };
  };
}

auto planned_for_share(const std::string& name, double share) {
  return planned(name, [share](const GptStep& step) {
    const StepBytes plain = step.bytes();
    return plain.peak - plain.activations + static_cast<int64_t>(share * static_cast<double>(plain.activations));
  });
}

int64_t peak_of_every_block(GptStep& step) {
  step.each_block.emplace();
  const int64_t peak = step.bytes().peak;
  step.each_block.reset();
  return peak;
}

// Forward through 1,000 small operators. Backward needs the input of each operator.
Tensor small_operators(Tensor x) {
  for (int i = 0; i < 1000; ++i) {
    x = x.sin();
  }
  return x.sum();
}

std::function<void()> operators_plain() {
  const Tensor x = torch::ones({8}, torch::requires_grad());
  return [x] { small_operators(x); };
}

// Halfway between plain training and the most frugal plan.
int64_t middle_budget(const snug::plan::Simulator& simulator) {
  const snug::plan::Curve ends = snug::plan::curve(simulator, {.points = 2});
  return (ends.points.front().plain_peak_bytes + ends.smallest_feasible_bytes()) / 2;
}

std::function<void()> operators_planned() {
  const Tensor x = torch::ones({8}, torch::requires_grad());
  const auto forward = [x] { return small_operators(x); };
  const snug::plan::Profile profile = snug::detail::profile_step(forward);
  const snug::ActivationPlan plan =
      snug::detail::unverified_plan(profile, snug::Bytes(middle_budget(snug::plan::Simulator(profile))));
  return [step = measure::under_plan(forward, plan)] { step(); };
}

// 48 blocks. A plan depends on the number of operators, not on the operators' sizes.
snug::plan::Profile profile_48() {
  const DeepModel model = measure::deep_gpt(/*layers=*/48, /*width=*/64, /*context=*/64, /*batch=*/1);
  const Tensor tokens = model.input(model.batch);
  return snug::detail::profile_step(
      [&] { return model.loss(tokens, [&](Tensor x) { return measure::in_order(model.layers, std::move(x)); }); });
}

// Ten budgets.
std::function<void()> curve_48() {
  return [simulator = snug::plan::Simulator(profile_48())] { snug::plan::curve(simulator); };
}

std::function<void()> search_48() {
  const snug::plan::Simulator simulator(profile_48());
  const auto search = [simulator, budget = middle_budget(simulator)] {
    return std::get<snug::plan::Solution>(snug::plan::Solver(simulator).solve(budget));
  };
  std::fprintf(stderr, "search_48: at most %.2f %% slower than the best possible plan\n", 100 * search().gap());
  return search;
}

}  // namespace

int main() {
  return snug::benchmarks::serve({
      {"tiny_plain", tiny([](const Tensor& x) { return x.sin(); })},
      {"tiny_checkpoint",
       tiny([](const Tensor& x) { return snug::checkpoint([](const Tensor& y) { return y.sin(); }, x); })},
      {"gpt_plain", gpt("gpt_plain", std::nullopt)},
      {"gpt_every_block", gpt("gpt_every_block", snug::CheckpointOptions{})},
      {"gpt_save_matmuls", gpt("gpt_save_matmuls", snug::CheckpointOptions{.policy = snug::save_matmuls})},
      {"gpt_half", planned_for_share("gpt_half", 0.5)},
      {"gpt_quarter", planned_for_share("gpt_quarter", 0.25)},
      {"gpt_9_percent", planned_for_share("gpt_9_percent", 0.09)},
      {"gpt_as_every_block", planned("gpt_as_every_block", peak_of_every_block)},
      {"operators_plain", operators_plain},
      {"operators_planned", operators_planned},
      {"search_48", search_48},
      {"curve_48", curve_48},
  });
}
