#include "snug/activations/rematerialize.h"

#include <algorithm>
#include <optional>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include "snug/activations/detail/op_tape.h"
#include "snug/activations/detail/tape_recorder.h"
#include "snug/activations/detail/tape_schedule.h"
#include "snug/core/error.h"
#include "snug/core/rng.h"

namespace snug {
namespace {

using detail::OpTape;

// The leaves into which backward accumulates.
std::vector<at::Tensor> leaves_of(const at::Tensor& loss) {
  std::vector<at::Tensor> leaves;
  std::unordered_set<torch::autograd::Node*> seen;
  std::vector<torch::autograd::Node*> pending;
  const auto visit = [&](const auto& node) {
    if (node && seen.insert(&*node).second) {
      pending.push_back(&*node);
    }
  };
  visit(loss.grad_fn());
  while (!pending.empty()) {
    torch::autograd::Node* node = pending.back();
    pending.pop_back();
    if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
      leaves.push_back(leaf->variable);
    }
    for (const auto& edge : node->next_edges()) {
      visit(edge.function);
    }
  }
  return leaves;
}

// Keeps the gradients of a loss's leaves and puts them back.
class GradientsBefore {
 public:
  explicit GradientsBefore(const at::Tensor& loss) {
    const c10::NoGradGuard no_grad;
    for (const at::Tensor& leaf : leaves_of(loss)) {
      if (torch::autograd::impl::post_acc_grad_hooks(leaf) != nullptr) {
        throw ConfigError(
            "profile_step: a parameter has a hook that runs when its gradient is complete, as StepInBackward sets; "
            "profiling would "
            "run it. Plan before it is set");
      }
      const at::Tensor& grad = leaf.grad();
      before_.push_back({leaf, grad, grad.defined() ? grad.clone() : at::Tensor()});
    }
  }
  void restore() {
    const c10::NoGradGuard no_grad;
    for (One& one : before_) {
      if (one.gradient.defined()) {
        one.gradient.copy_(one.values);
      }
      one.leaf.mutable_grad() = one.gradient;
    }
  }

 private:
  struct One {
    at::Tensor leaf, gradient, values;
  };
  std::vector<One> before_;
};

at::Tensor checked_loss(at::Tensor loss) {
  if (!loss.defined() || loss.numel() != 1 || !loss.requires_grad() || loss.is_leaf()) {
    throw ConfigError(
        "plan_activations: the callable must return the loss, a scalar that was computed from what requires a "
        "gradient; it returned " +
        (loss.defined() ? fmt::format("a tensor of {} elements{}", loss.numel(),
                                      loss.requires_grad() && !loss.is_leaf() ? "" : " without a graph")
                        : std::string("an undefined one")));
  }
  if (!loss.is_cpu()) {
    throw ConfigError(
        fmt::format("plan_activations: profiles are taken on a CPU so far; the loss is on {}", loss.device().str()));
  }
  return loss;
}

// Runs a step on a tape, and leaves gradients and buffers as they were.
void run_and_restore(const std::function<at::Tensor()>& forward_and_loss, const std::shared_ptr<OpTape>& tape,
                     detail::TapeRecorder& recorder) {
  std::optional<GradientsBefore> gradients;
  struct Restore {
    std::optional<GradientsBefore>& gradients;
    detail::TapeRecorder& recorder;
    OpTape& tape;
    ~Restore() {
      tape.forget_listener();
      recorder.restore_outside();
      if (gradients) {
        gradients->restore();
      }
    }
  } restore{gradients, recorder, *tape};
  at::Tensor loss;
  {
    const detail::PolicyScope saved(std::make_shared<detail::TapePolicy>(tape));
    const detail::OperatorScope operators(*tape);
    loss = checked_loss(forward_and_loss());
  }
  tape->close();
  recorder.pause(true);
  gradients.emplace(loss);
  recorder.pause(false);
  recorder.begin_backward();
  loss.backward();
  recorder.stop();
}

// The least of each operator's times over a few runs of the same step.
void take_least_times(StepProfile& profile, const StepProfile& other) {
  if (profile.operators.size() != other.operators.size() || profile.backward.size() != other.backward.size()) {
    return;
  }
  const auto take = [](auto& ones, const auto& others) {
    for (size_t i = 0; i < ones.size(); ++i) {
      ones[i].seconds = std::min(ones[i].seconds, others[i].seconds);
    }
  };
  take(profile.operators, other.operators);
  take(profile.backward, other.backward);
}

constexpr int kProfilingRuns = 3;
constexpr int kVerifications = 5;

}  // namespace

// --- profile

StepProfile profile_step(const std::function<at::Tensor()>& forward_and_loss) {
  std::optional<StepProfile> profile;
  for (int run = 0; run < kProfilingRuns; ++run) {
    const RngGuard generators;
    detail::TapeRecorder recorder;
    const auto tape = std::make_shared<OpTape>(nullptr, &recorder);
    run_and_restore(forward_and_loss, tape, recorder);
    StepProfile one = recorder.take();
    if (profile) {
      take_least_times(one, *profile);
    }
    profile = std::move(one);
  }
  profile->check();
  return std::move(*profile);
}

// --- plan

struct ActivationPlan::Content {
  StepSimulator simulator;
  RematPlan plan;
  std::shared_ptr<const detail::TapeSchedule> schedule;

  Content(StepSimulator of, RematPlan chosen)
      : simulator(std::move(of)),
        plan(std::move(chosen)),
        schedule(std::make_shared<detail::TapeSchedule>(
            detail::make_schedule(simulator.profile(), plan.hold_from, possible(simulator.run(plan.hold_from))))) {}

  static Simulation possible(Simulation simulation) {
    if (simulation.impossible >= 0) {
      throw ConfigError(fmt::format("ActivationPlan: the plan drops storage {}, which cannot be rebuilt; plan again",
                                    simulation.impossible));
    }
    return simulation;
  }

  static std::shared_ptr<const Content> solve(const StepProfile& profile, Bytes budget, SolverOptions options) {
    StepSimulator simulator(profile);
    PlanSolver solver(simulator, options);
    PlanAnswer answer = solver.solve(budget.count());
    if (std::holds_alternative<Infeasible>(answer)) {
      RematPlan smallest = PlanSolver(simulator, options).smallest();  // which the search for a fast one may miss
      if (smallest.peak_bytes > budget.count()) {
        const Bytes bytes(smallest.peak_bytes);
        throw BudgetExceeded(
            fmt::format("plan_activations: no plan was found that runs the step within {}; the smallest that was found "
                        "takes {} ({} bytes)",
                        budget.str(), bytes.str(), bytes.count()),
            bytes);
      }
      answer = std::move(smallest);
    }
    return std::make_shared<const Content>(std::move(simulator), std::get<RematPlan>(std::move(answer)));
  }
};

ActivationPlan::ActivationPlan(std::shared_ptr<const Content> content)
    : predicted_peak_bytes(content->plan.peak_bytes),
      predicted_seconds(content->plan.seconds),
      plain_peak_bytes(content->plan.plain_peak_bytes),
      plain_seconds(content->plan.plain_seconds),
      content_(std::move(content)) {}

ActivationPlan::ActivationPlan(const StepProfile& profile, Bytes budget, SolverOptions options)
    : ActivationPlan(Content::solve(profile, budget, options)) {}

std::string ActivationPlan::explain() const { return snug::explain(content_->simulator, content_->plan); }

std::string ActivationPlan::to_json() const {
  return nlohmann::ordered_json{{"plan", nlohmann::ordered_json::parse(content_->plan.to_json())},
                                {"profile", nlohmann::ordered_json::parse(content_->simulator.profile().to_json())}}
      .dump();
}

ActivationPlan ActivationPlan::from_json(std::string_view text) {
  const auto json = nlohmann::ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("plan") || !json.contains("profile")) {
    throw ConfigError("ActivationPlan.from_json: this is no plan with its profile, as to_json writes it");
  }
  RematPlan plan = RematPlan::from_json(json["plan"].dump());
  StepSimulator simulator(StepProfile::from_json(json["profile"].dump()));
  if (plan.hold_from.size() != simulator.profile().storages.size()) {
    throw ConfigError("ActivationPlan.from_json: the plan and the profile do not belong together");
  }
  return ActivationPlan(std::make_shared<const Content>(std::move(simulator), std::move(plan)));
}

const StepProfile& ActivationPlan::profile() const { return content_->simulator.profile(); }
const RematPlan& ActivationPlan::choice() const { return content_->plan; }

// Those that have other bits when they are rebuilt.
std::set<int> ActivationPlan::differing_storages(const std::function<at::Tensor()>& forward_and_loss) const {
  const RngGuard generators;
  detail::TapeRecorder recorder;
  const auto tape = std::make_shared<OpTape>(content_->schedule, &recorder);
  tape->verify_values();
  run_and_restore(forward_and_loss, tape, recorder);
  return tape->different();
}

ActivationPlan plan_activations(const std::function<at::Tensor()>& forward_and_loss, Bytes budget) {
  StepProfile profile = profile_step(forward_and_loss);
  for (int k = 0;; ++k) {
    ActivationPlan plan(profile, budget);
    const std::set<int> different = plan.differing_storages(forward_and_loss);
    if (different.empty()) {
      return plan;
    }
    if (k == kVerifications) {
      throw Error(
          "plan_activations: the model computes other values each time that an operator runs again; it cannot be "
          "rematerialized");
    }
    for (const int storage : different) {
      profile.storages[static_cast<size_t>(storage)].kind = StorageKind::Pinned;
    }
  }
}

// --- scope

class Rematerialize::Impl {
 public:
  explicit Impl(std::shared_ptr<const detail::TapeSchedule> schedule)
      : tape(std::make_shared<OpTape>(std::move(schedule))) {
    saved.emplace(std::make_shared<detail::TapePolicy>(tape));
    operators.emplace(*tape);
  }

  std::shared_ptr<OpTape> tape;
  std::optional<detail::PolicyScope> saved;
  std::optional<detail::OperatorScope> operators;
};

Rematerialize::Rematerialize(ActivationPlan plan) : impl_(std::make_unique<Impl>(plan.content_->schedule)) {}

Rematerialize::~Rematerialize() {
  impl_->operators.reset();
  impl_->saved.reset();
  impl_->tape->close();
}

std::string Rematerialize::deviation() const { return impl_->tape->deviation(); }
std::shared_ptr<const std::atomic<int64_t>> Rematerialize::replayed_operators() const {
  return impl_->tape->replayed();
}

}  // namespace snug
