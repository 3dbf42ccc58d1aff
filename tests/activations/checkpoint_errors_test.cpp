#include <functional>
#include <stdexcept>
#include <vector>

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/autocast.h"
#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/tensors.h"

// What goes wrong inside a region, or between forward and backward, must be an error, never a wrong gradient, and must
// leave the thread as it was.

namespace snug::checkpoint_errors_test {
namespace {

using testing::error_of;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;

struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Everything that a region sets on this thread, for comparison.
struct ThreadState {
  bool autocast = at::autocast::is_autocast_enabled(torch::kCPU);
  bool cache = at::autocast::is_autocast_cache_enabled();
  bool gradients = torch::GradMode::is_enabled();
  c10::ScalarType dtype = at::autocast::get_autocast_dtype(torch::kCPU);
  bool operator==(const ThreadState&) const = default;
};

Tensor generator_state() { return at::detail::getDefaultCPUGenerator().get_state(); }

/// True if tensors saved now are neither dropped nor handed to anybody.
bool saving_is_plain() {
  const Tensor x = torch::rand({3}, torch::requires_grad());
  const Tensor y = x.exp();
  int asked = 0;
  {
    const SavedTensorHooks hooks(
        [&](const Tensor& t) {
          ++asked;
          return std::any(t.detach());
        },
        [](std::any& kept) { return std::any_cast<Tensor&>(kept); });
    x.exp();
  }
  y.sum().backward();
  return asked == 1 && torch::equal(x.grad(), y.detach());
}

TEST(CheckpointErrors, AnExceptionInForwardLeavesTheThreadAsItWas) {
  const ThreadState before;
  const Tensor x = torch::rand({3}, torch::requires_grad());
  const auto fail = [&] {
    checkpoint(
        [](const Tensor& t) -> Tensor {
          t.exp();
          throw Broken("in forward");
        },
        x);
  };
  EXPECT_EQ(error_of<Broken>(fail), "in forward");
  EXPECT_EQ(ThreadState(), before);
  EXPECT_TRUE(saving_is_plain());
}

TEST(CheckpointErrors, WantOfMemoryInTheRecomputationLeavesTheThreadAsItWasAndTheGraphUsable) {
  const auto gradient = [](bool fails_first) {
    torch::manual_seed(1);
    const Tensor x = torch::linspace(-1, 1, 5).requires_grad_();
    Tensor loss;
    {
      const Autocast autocast(torch::kCPU, torch::kBFloat16);
      loss = checkpoint([](const Tensor& t) { return (t.exp() * torch::rand({5})).sin().exp(); }, x).sum();
    }
    const ThreadState before;
    const auto backward = [&](testing::FailingAllocation& allocation) {
      const Tensor generator = generator_state();
      EXPECT_TRUE(allocation.stops([&] { loss.backward({}, /*retain_graph=*/true); }));
      EXPECT_EQ(ThreadState(), before);
      EXPECT_TRUE(torch::equal(generator_state(), generator));
      EXPECT_TRUE(saving_is_plain());
      EXPECT_FALSE(x.grad().defined());
    };
    for (int64_t number = 2; fails_first && number < 5; ++number) {  // the first allocation is of the loss's gradient
      testing::FailingAllocation allocation(number);
      backward(allocation);
    }
    loss.backward();
    return x.grad();
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

TEST(CheckpointErrors, ACallableThatWouldDoSomethingElseByNowHasTheGradientOfItsForward) {
  bool other = false;
  const Tensor x = torch::rand({2, 3}, torch::requires_grad());
  const auto region = [&](const Tensor& h) { return other ? h.exp().sum(0).tanh().sin() : h.exp().tanh().sin(); };
  const Tensor expected = torch::autograd::grad({region(x).sum()}, {x})[0];
  const Tensor loss = checkpoint(region, x).sum();
  other = true;
  EXPECT_TRUE(same_bits(torch::autograd::grad({loss}, {x})[0], expected));
}

TEST(CheckpointErrors, AnInputThatIsWrittenBetweenForwardAndBackwardIsAnErrorIfItIsNeeded) {
  // A leaf, and a result of autograd.
  const Tensor leaf = torch::rand({3}, torch::requires_grad());
  const Tensor result = torch::rand({3}, torch::requires_grad()) + 1;
  const Tensor weight = torch::rand({3}, torch::requires_grad());
  const auto region = [](const Tensor& t, const Tensor& w) { return (t + 1).exp() * w; };
  const auto write = [](const Tensor& input) {
    const torch::NoGradGuard no_grad;
    input.add_(1);
  };
  for (const Tensor& input : {leaf, result}) {
    const Tensor loss = checkpoint({.label = "x"}, region, input, weight).sum();
    write(input);
    EXPECT_THAT(error_of<Error>([&] { loss.backward(); }),
                HasSubstr("checkpoint 'x': a parameter, buffer or input was written in place after"));
  }
  // Operators without a gradient do not run again, so nobody needs an input without a gradient.
  const Tensor constant = torch::rand({3});
  const Tensor expected = torch::autograd::grad({region(constant, weight).sum()}, {weight})[0];
  const Tensor loss = checkpoint(region, constant, weight).sum();
  write(constant);
  EXPECT_TRUE(same_bits(torch::autograd::grad({loss}, {weight})[0], expected));
}

TEST(CheckpointErrors, ACallableThatWritesToAnArgumentHasTheGradientsOfPlainTraining) {
  const auto run = [](bool checkpointed, bool requires_grad) {
    const Tensor weight = torch::linspace(0.5, 1, 3).requires_grad_(), leaf = torch::linspace(-1, 1, 3);
    leaf.set_requires_grad(requires_grad);
    const Tensor input = leaf * 2;
    const auto write = [](const Tensor& w, const Tensor& t) {
      const Tensor before = t.exp() * w;
      t.add_(1);
      return (t.clone() * w).exp() + before.sin();
    };
    const Tensor y = checkpointed ? checkpoint(write, weight, input) : write(weight, input);
    (y.sum() + input.square().sum() * weight.sum()).backward();
    return std::vector{weight.grad(), leaf.grad(), input.detach()};
  };
  for (const bool requires_grad : {false, true}) {
    EXPECT_TRUE(same_bits(run(true, requires_grad), run(false, requires_grad))) << requires_grad;
  }
}

// The written input then hangs from a node of the region, which keeps the region, which keeps the input.
TEST(CheckpointErrors, AnArgumentThatWasWrittenIsReleasedWithItsGraph) {
  const int64_t before = live_bytes(torch::kCPU).count();
  for (const bool throws : {false, true}) {
    {
      const Tensor input = torch::rand({1000}, torch::requires_grad()) + 1;
      const auto write = [throws](const Tensor& t) {
        t.exp_();
        if (throws) {
          throw Broken("after the write");
        }
        return t.sin();
      };
      if (throws) {
        EXPECT_THROW(checkpoint(write, input), Broken);
      } else {
        checkpoint(write, input);
      }
    }
    EXPECT_EQ(live_bytes(torch::kCPU).count(), before) << throws;
  }
}

TEST(CheckpointErrors, BackwardThroughAnArgumentThatWasWrittenIsAsInPlainTraining) {
  const auto gradient = [](bool checkpointed) {
    const Tensor x = torch::linspace(-1, 1, 3).requires_grad_();
    const Tensor input = x + 1;
    const auto write = [](const Tensor& t) { return t.exp_().sin(); };
    checkpointed ? checkpoint(write, input) : write(input);
    input.sum().backward();
    return x.grad();
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

TEST(CheckpointErrors, AWeightThatIsWrittenBetweenForwardAndBackwardIsAnError) {
  const auto loss_after_write = [](const std::function<Tensor(const Tensor&)>& after) {
    const Tensor weight = torch::rand({3}, torch::requires_grad());
    const Tensor x = torch::rand({3}, torch::requires_grad());
    Tensor loss = checkpoint({.label = "x"}, [&](const Tensor& t) { return after(t * weight); }, x).sum();
    const torch::NoGradGuard no_grad;
    weight.mul_(2);
    return loss;
  };
  const Tensor of_product = loss_after_write([](const Tensor& product) { return product; });
  EXPECT_THAT(error_of<c10::Error>([&] { of_product.backward(); }), HasSubstr("modified by an inplace operation"))
      << "autograd saved the weight itself";
  const Tensor of_sine = loss_after_write([](const Tensor& product) { return product.sin(); });
  EXPECT_THAT(error_of<Error>([&] { of_sine.backward(); }),
              HasSubstr("checkpoint 'x': a parameter, buffer or input was written in place after"));
}

TEST(CheckpointErrors, AnErrorInANestedRegionNamesTheInnerOne) {
  const Tensor x = torch::rand({3}, torch::requires_grad()), weight = torch::rand({3}, torch::requires_grad());
  const auto inner = [&](const Tensor& t) { return (t * weight).sin(); };
  const Tensor y = checkpoint(
      {.label = "outer"}, [&](const Tensor& t) { return checkpoint({.label = "inner"}, inner, t.cos()); }, x);
  {
    const torch::NoGradGuard no_grad;
    weight.mul_(2);
  }
  EXPECT_THAT(error_of<Error>([&] { y.sum().backward(); }), HasSubstr("checkpoint 'inner'"));
  EXPECT_TRUE(saving_is_plain());
}

// An operator that throws has written nothing.
TEST(CheckpointErrors, ACallableMayCatchWhatAnOperatorThrows) {
  const auto gradient = [](bool checkpointed) {
    const Tensor x = torch::linspace(-1, 1, 3).requires_grad_();
    const auto fn = [](const Tensor& t) {
      Tensor y = t.exp();
      EXPECT_THROW(y.add_(torch::ones({4})), c10::Error);
      return y.sin().mul_(2).tanh();
    };
    (checkpointed ? checkpoint(fn, x) : fn(x)).sum().backward();
    return x.grad();
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

}  // namespace
}  // namespace snug::checkpoint_errors_test
