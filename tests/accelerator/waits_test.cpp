// Whether the host waits for the device in a step, and how many operators a step queues beside the model's.

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/torch.h>

#include "snug/distributed/data_parallel.h"
#include "snug/distributed/sync_batch_norm.h"
#include "snug/stepper.h"
#include "src/distributed/process_group_impl.h"
#include "src/precision/guard_evidence.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"
#include "tests/accelerator/accelerator.h"
#include "tests/support/move_to.h"
#include "tests/support/planned_step.h"

namespace snug::waits_test {
namespace {

using testing::accelerator;
using testing::leaf;
using torch::Tensor;

struct Done final : c10d::Work {
  bool wait(std::chrono::milliseconds) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
    future->markCompleted();
    return future;
  }
};

struct FakeBackend final : c10d::Backend {
  using c10d::Backend::Backend;
  using Work = c10::intrusive_ptr<c10d::Work>;
  Work broadcast(std::vector<Tensor>&, const c10d::BroadcastOptions&) override { return c10::make_intrusive<Done>(); }
  Work allreduce(std::vector<Tensor>&, const c10d::AllreduceOptions&) override { return c10::make_intrusive<Done>(); }
  Work allgather(std::vector<std::vector<Tensor>>& to, std::vector<Tensor>& from,
                 const c10d::AllgatherOptions&) override {
    for (Tensor& one : to[0]) {
      one.copy_(from[0]);
    }
    return c10::make_intrusive<Done>();
  }
};

// A group that connects the simulated accelerator. With several ranks, gathers find this rank's values for all ranks.
std::shared_ptr<ProcessGroup> group_of(int ranks) {
  auto impl = std::make_unique<ProcessGroup::Impl>();
  impl->group = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), 0, ranks);
  impl->backend = c10::make_intrusive<FakeBackend>(0, ranks);
  impl->group->setBackend(c10::kCPU, c10d::ProcessGroup::GLOO, impl->backend);
  impl->group->setDefaultBackend(c10d::ProcessGroup::GLOO);
  impl->accelerator = accelerator().type();
  impl->make_device_backend = [backend = impl->backend] { return backend; };
  return std::make_shared<ProcessGroup>(std::move(impl));
}

// Notes until when the host has waited for the device when an update begins.
class NotingSGD final : public torch::optim::SGD {
 public:
  using SGD::SGD;
  Tensor step(LossClosure closure) override {
    waited = sim_device::host_seconds();
    return SGD::step(std::move(closure));
  }
  double waited = -1;
};

// A step without any wait from forward to the update.
void expect_no_wait_before_the_update(const StepperOptions& options, torch::nn::Linear& model) {
  NotingSGD optimizer(model->parameters(), 0.1);
  Stepper stepper(model, optimizer, options);
  const Batch batch{torch::randn({4, 8}, accelerator())};
  for (int i = 0; i < 3; ++i) {
    double in_forward = -1;
    const StepResult result = stepper.step(batch, [&](const Batch& micro) {
      in_forward = sim_device::host_seconds();
      const Tensor y = model->forward(micro[0]);
      return Loss::sum(y.square().sum(), micro.size()).with("absolute", y.abs().sum());
    });
    EXPECT_EQ(optimizer.waited, in_forward) << "step " << i;
    EXPECT_GT(result.loss(), 0);
    EXPECT_GT(sim_device::host_seconds(), in_forward) << "the loss is on the device";
  }
}

torch::nn::Linear linear() {
  torch::nn::Linear model(8, 3);
  testing::move_to(*model, accelerator());
  return model;
}

TEST(Waits, ThereIsNoneBeforeTheUpdateOnRanks) {
  SNUG_SKIP_UNLESS_SIMULATED();
  torch::nn::Linear model = linear();
  const auto group = group_of(1);
  DataParallel parallel(model, group);
  expect_no_wait_before_the_update({.ranks = {.data_parallel = &parallel}}, model);
}

TEST(Waits, ThereIsNoneBeforeTheUpdateForThePrecisionGuard) {
  SNUG_SKIP_UNLESS_SIMULATED();
  torch::nn::Linear model = linear();
  expect_no_wait_before_the_update({.precision = Precision::BFloat16, .sixteen_bit = {.guard = {.patience = 2}}},
                                   model);
}

// The count is there before backward is done.
TEST(Waits, ThereIsNoneForBackwardIfTheCountIsOnTheDevice) {
  SNUG_SKIP_UNLESS_SIMULATED();
  torch::nn::Linear model = linear();
  double in_backward = 0;
  model->weight.register_hook([&](const Tensor&) { in_backward = sim_device::virtual_seconds(); });
  NotingSGD optimizer(model->parameters(), 0.1);
  Stepper stepper(model, optimizer, {.micro_batch = 2});
  const StepResult result = stepper.step(Batch{torch::randn({4, 8}, accelerator())}, [&](const Batch& micro) {
    const Tensor y = model->forward(micro[0]);
    return Loss::sum(y.square().sum(), (y.abs() < 100).sum());
  });
  EXPECT_EQ(result.items, 12);
  EXPECT_LT(optimizer.waited, in_backward);
}

TEST(Waits, ThePrecisionGuardCountsByTwoOperatorsForAGradient) {
  SNUG_SKIP_UNLESS_SIMULATED();
  const auto operators_for = [](int parameters) {
    std::vector<std::pair<std::string, Tensor>> named;
    for (int i = 0; i < parameters; ++i) {
      named.emplace_back("block" + std::to_string(i % 2) + ".weight", leaf({4}));
      named.back().second.mutable_grad() =
          torch::tensor({1.0f, 0.0f, i % 2 == 0 ? 2.0f : std::numeric_limits<float>::infinity(), 3.0f})
              .to(accelerator());
    }
    const double began = sim_device::virtual_seconds();
    const auto evidence = detail::gradient_evidence(named, {"block0", "block1"});
    const double operators = (sim_device::virtual_seconds() - began) / sim_device::kOperatorSeconds;
    EXPECT_EQ(evidence().at(1).second.zeros, 0.25);
    EXPECT_TRUE(evidence().at(1).second.non_finite);
    EXPECT_FALSE(evidence().at(0).second.non_finite);
    return operators;
  };
  EXPECT_EQ(operators_for(30) - operators_for(10), 2 * 20);
}

TEST(Waits, ThereIsNoneForTheStatisticsOfSyncBatchNorm) {
  SNUG_SKIP_UNLESS_SIMULATED();
  SyncBatchNorm norm(torch::nn::BatchNormOptions(3), group_of(2));
  testing::move_to(*norm, accelerator());
  const Tensor x = leaf({2, 3, 5, 5});
  const int64_t before = sim_device::host_reads();
  norm->forward(x).square().sum().backward();
  EXPECT_EQ(sim_device::host_reads(), before);
  EXPECT_TRUE(x.grad().defined());
  EXPECT_THROW(norm->forward(leaf({0, 3, 5, 5})), ConfigError) << "no values on any rank";
}

// A step of a model of so many layers.
std::function<Tensor()> step_of(int layers) {
  torch::nn::Sequential model;
  for (int i = 0; i < layers; ++i) {
    model->push_back(torch::nn::Linear(8, 8));
    model->push_back(torch::nn::GELU());
  }
  testing::move_to(*model, accelerator());
  return [model, x = torch::randn({512, 8}, accelerator())]() mutable { return model->forward(x).square().sum(); };
}

TEST(Waits, TheCheckOfAPlanHasAsManyForManyLayersAsForFew) {
  SNUG_SKIP_UNLESS_SIMULATED();
  const auto waits_for = [](int layers) {
    const auto step = step_of(layers);
    const plan::Profile profile = detail::profile_step(step);
    const int64_t before = sim_device::host_reads();
    const ActivationPlan plan = detail::plan_activations(profile, step, testing::smallest_feasible(profile));
    EXPECT_GT(plan.predicted_seconds, plan.plain_seconds) << "the plan rebuilds nothing";
    return sim_device::host_reads() - before;
  };
  EXPECT_EQ(waits_for(12), waits_for(4));
}

// Only what the plan drops is compared.
TEST(Waits, TheCheckOfAPlanHashesNoTensorThatThePlanKeeps) {
  SNUG_SKIP_UNLESS_SIMULATED();
  const auto operators_of = [](const auto& work) {
    const double began = sim_device::virtual_seconds();
    work();
    return std::lround((sim_device::virtual_seconds() - began) / sim_device::kOperatorSeconds);
  };
  const auto operators_of_the_check = [&](int layers) {
    const auto step = step_of(layers);
    const plan::Profile profile = detail::profile_step(step);
    const auto all = operators_of([&] { detail::plan_activations(profile, step, Bytes::unlimited()); });
    return all - operators_of([&] { step().backward(); });
  };
  EXPECT_EQ(operators_of_the_check(12), operators_of_the_check(4));
}

}  // namespace
}  // namespace snug::waits_test
