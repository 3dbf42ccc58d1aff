// Autograd's engine with snug's in front of it.

#include <any>
#include <atomic>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/SavedTensorHooks.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "src/memory/backward_pass.h"
#include "src/memory/forwarding_engine.h"
#include "src/memory/operator_mode.h"
#include "src/memory/saved_tensor_policy.h"
#include "tests/support/hooked_model.h"
#include "tests/support/tensors.h"

namespace snug::autograd_engine_test {
namespace {

using testing::clones_of;
using testing::error_of;
using testing::gradients_of;
using testing::gradients_with;
using ::testing::HasSubstr;
using testing::make_model;
using testing::plain_gradients;
using testing::same_bits;
using torch::Tensor;

std::any keep(const Tensor& t) { return t.detach(); }
Tensor give(std::any& kept) { return std::any_cast<Tensor&>(kept); }

// --- engines

/// Another library's: leaves all work to the engine that was there before it.
struct ForeignEngine final : detail::ForwardingEngine {
  using ForwardingEngine::ForwardingEngine;
  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    ++passes;
    return ForwardingEngine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    ++asked;
    return ForwardingEngine::get_default_saved_variable_hooks();
  }
  std::atomic<int> passes = 0, asked = 0;  // of all threads
};
ForeignEngine* foreign_engine = nullptr;

/// Never destroyed, as real ones.
ForeignEngine& install_foreign_engine(torch::autograd::Engine& over) {
  foreign_engine = new ForeignEngine(over);
  torch::autograd::set_default_engine_stub(+[]() -> torch::autograd::Engine& { return *foreign_engine; });
  return *foreign_engine;
}

void expect_hooks_and_engine_to_work(ForeignEngine& foreign) {
  int packed = 0;
  const auto gradients = gradients_with(
      [&](const Tensor& t) {
        ++packed;
        return keep(t);
      },
      &give);
  EXPECT_TRUE(same_bits(gradients, plain_gradients()));
  EXPECT_GT(packed, 0) << "hooks were lost";
  EXPECT_GE(foreign.passes, 2) << "the other library's engine was passed over";
  EXPECT_GT(foreign.asked, 0) << "where there are no hooks of snug's";
  const MemoryMeter meter;
  const Tensor y = torch::rand({100}, torch::requires_grad()).exp().exp();
  torch::empty({10000});
  EXPECT_EQ(meter.report().activations, 800) << "the meter was not told";
}

TEST(AutogradEngine, OfAnotherLibraryThatWasThereFirstGoesOnWorking) {
  expect_hooks_and_engine_to_work(install_foreign_engine(torch::autograd::Engine::get_base_engine()));
}

TEST(AutogradEngine, OfAnotherLibraryThatCameLaterTakesNoHooksAway) {
  plain_gradients();
  {
    const SavedTensorHooks hooks(&keep, &give);
  }
  ForeignEngine& foreign = install_foreign_engine(torch::autograd::Engine::get_default_engine());
  expect_hooks_and_engine_to_work(foreign);
}

TEST(AutogradEngine, StaysTheSameWhereNoOtherComes) {
  const auto engine_under_hooks = [] {
    const SavedTensorHooks hooks(&keep, &give);
    return &torch::autograd::Engine::get_default_engine();
  };
  const auto* const engine = engine_under_hooks();
  EXPECT_EQ(engine_under_hooks(), engine);
  EXPECT_EQ(&torch::autograd::Engine::get_default_engine(), engine);
}

TEST(AutogradEngine, TakesNoHooksWherePythonAllowsNone) {
  int packed = 0;
  const SavedTensorHooks hooks(
      [&](const Tensor& t) {
        ++packed;
        return keep(t);
      },
      &give);
  const Tensor a = torch::rand({3}, torch::requires_grad());
  at::SavedTensorDefaultHooks::disable("not here");
  a.exp();
  at::SavedTensorDefaultHooks::enable();
  EXPECT_EQ(packed, 0);
  a.exp();
  EXPECT_EQ(packed, 1);
}

/// x -> x, whose backward pass runs another backward pass through itself, and so on.
struct Deep : torch::autograd::Function<Deep> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, int64_t depth) {
    context->saved_data["depth"] = depth;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const int64_t depth = context->saved_data["depth"].toInt();
    if (depth == 0) {
      return {gradients[0], Tensor()};
    }
    const torch::AutoGradMode with_graph(true);
    const Tensor inner = gradients[0].detach().requires_grad_();
    return {torch::autograd::grad({Deep::apply(inner, depth - 1).sum()}, {inner})[0] * gradients[0], Tensor()};
  }
};

// LibTorch goes to another thread after 60.
TEST(AutogradEngine, RunsBackwardPassesInsideBackwardPassesToAnyDepth) {
  const Bytes before = live_bytes(torch::kCPU);
  {
    const SavedTensorHooks hooks(&keep, &give);
    const Tensor x = torch::rand({3}, torch::requires_grad());
    Deep::apply(x, 130).sum().backward();
    EXPECT_TRUE(torch::equal(x.grad(), torch::ones({3})));
  }
  while (live_bytes(torch::kCPU) > before) {  // the other thread lets go of its tensors a moment later
    std::this_thread::yield();
  }
}

struct FailsBackward : torch::autograd::Function<FailsBackward> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    throw Error("backward says no");
  }
};

/// Of three heads on one trunk the second to go backward fails, when gradients of the first are on their way.
Tensor three_heads(const Tensor& x) {
  const Tensor trunk = x.sin();
  const Tensor last = trunk.exp().sum();
  const Tensor failing = FailsBackward::apply(trunk.cos()).sum();
  return last + failing + trunk.tanh().sum();
}

TEST(AutogradEngine, KeepsNothingOfABackwardPassThatFailed) {
  const Tensor x = torch::rand({10000}, torch::requires_grad());
  const int64_t before = live_bytes(torch::kCPU).count();
  EXPECT_EQ(error_of<Error>([&] { detail::go_backward(three_heads(x)); }), "backward says no");
  EXPECT_EQ(live_bytes(torch::kCPU).count(), before);
  {
    const SavedTensorHooks hooks(&keep, &give);
    EXPECT_EQ(error_of<Error>([&] { three_heads(x).backward(); }), "backward says no");
  }
  EXPECT_EQ(live_bytes(torch::kCPU).count(), before);
}

TEST(AutogradEngine, GoesOnAfterABackwardPassInsideAnotherFailed) {
  struct Tries : torch::autograd::Function<Tries> {
    static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x.clone(); }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   const torch::autograd::variable_list& gradients) {
      const torch::AutoGradMode with_graph(true);
      const Tensor inner = torch::rand({10000}, torch::requires_grad());
      EXPECT_EQ(error_of<Error>([&] { three_heads(inner).backward(); }), "backward says no");
      return {gradients[0] * 2};
    }
  };
  const SavedTensorHooks hooks(&keep, &give);
  const Tensor x = torch::rand({10000}, torch::requires_grad());
  const Tensor trunk = x * 3;
  (trunk.sum() + Tries::apply(trunk).sum() + trunk.sum()).backward();
  EXPECT_TRUE(torch::equal(x.grad(), torch::full({10000}, 12.0f)));
}

TEST(BackwardOnThisThread, HoldsWhileHooksOrOperatorScopesDo) {
  const auto goes_to_other_threads = [] { return c10::AutogradState::get_tls_state().get_multithreading_enabled(); };
  struct Pass final : detail::OperatorPolicy {
    void call(const detail::OperatorCall& call, detail::Stack& stack) override { call.proceed(stack); }
  } pass;
  ASSERT_TRUE(goes_to_other_threads());
  {
    const SavedTensorHooks hooks(&keep, &give);
    EXPECT_FALSE(goes_to_other_threads());
    {
      const detail::OperatorScope operators(pass);
      EXPECT_FALSE(goes_to_other_threads());
    }
    EXPECT_FALSE(goes_to_other_threads());
  }
  EXPECT_TRUE(goes_to_other_threads());
  {
    const detail::OperatorScope operators(pass);
    EXPECT_FALSE(goes_to_other_threads());
  }
  EXPECT_TRUE(goes_to_other_threads());
}

}  // namespace
}  // namespace snug::autograd_engine_test
