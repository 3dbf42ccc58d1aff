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
#include "tests/support/tensors.h"

// What goes wrong inside or between the two calls of a region must be an error that names the region, never a wrong
// gradient, and must leave the thread as it was.

namespace snug::checkpoint_errors_test {
namespace {

using ::testing::AllOf;
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

TEST(CheckpointErrors, AnExceptionInTheRecomputationLeavesTheThreadAsItWas) {
  const Tensor x = torch::rand({3}, torch::requires_grad());
  bool broken = false;
  const auto fn = [&broken](const Tensor& t) {
    Tensor y = t.exp() * torch::rand({3});
    if (broken) {
      throw Broken("in the recomputation");
    }
    return y.sin();
  };
  Tensor loss;
  {
    const Autocast autocast(torch::kCPU, torch::kBFloat16);
    loss = checkpoint(fn, x).sum();
  }
  const ThreadState before;
  const Tensor generator = generator_state();
  broken = true;
  EXPECT_EQ(error_of<Broken>([&] { loss.backward({}, /*retain_graph=*/true); }), "in the recomputation");
  EXPECT_EQ(ThreadState(), before);
  EXPECT_TRUE(torch::equal(generator_state(), generator));
  EXPECT_TRUE(saving_is_plain());
  EXPECT_FALSE(x.grad().defined());
}

TEST(CheckpointErrors, AfterAFailedRecomputationARetainedGraphCanGoBackward) {
  const auto gradient = [](bool fail_first) {
    const Tensor x = torch::linspace(-1, 1, 5).requires_grad_();
    bool broken = false;
    const Tensor loss = checkpoint(
                            [&broken](const Tensor& t) {
                              Tensor y = t.exp().sin();
                              if (broken) {
                                throw Broken("once");
                              }
                              return y.exp();
                            },
                            x)
                            .sum();
    if (fail_first) {
      broken = true;
      EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), Broken);
      broken = false;
    }
    loss.backward();
    return x.grad();
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

TEST(CheckpointErrors, OtherMetadataInTheRecomputationIsAnErrorThatNamesRegionTensorAndBoth) {
  const auto message_for = [](const auto& change) {
    bool again = false;
    const Tensor x = torch::rand({2, 3}, torch::requires_grad());
    const Tensor y = checkpoint(
        {.label = "blocks.3"},
        [&again, change](const Tensor& t) {
          const Tensor h = t.exp();
          return again ? change(h).sin() : h.sin();
        },
        x);
    again = true;
    return error_of<Error>([&] { y.sum().backward(); });
  };
  EXPECT_THAT(message_for([](const Tensor& h) { return h.flatten(); }),
              AllOf(HasSubstr("blocks.3"), HasSubstr("saved tensor 1"), HasSubstr("Float[2, 3] on cpu"),
                    HasSubstr("Float[6] on cpu")));
  EXPECT_THAT(message_for([](const Tensor& h) { return h.to(torch::kDouble); }),
              AllOf(HasSubstr("blocks.3"), HasSubstr("Double[2, 3] on cpu")));
}

TEST(CheckpointErrors, MetadataMayDifferWhereOnlyTheNumberIsChecked) {
  bool again = false;
  const Tensor x = torch::rand({3}, torch::requires_grad());
  const Tensor y = checkpoint(
      {.determinism = Determinism::None}, [&again](const Tensor& t) { return (again ? t.unsqueeze(0) : t).exp(); }, x);
  again = true;
  y.sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), x.detach().exp()));
}

TEST(CheckpointErrors, FewerSavedTensorsInTheRecomputationAreAnErrorWithBothNumbers) {
  for (const bool early_stop : {true, false}) {
    bool again = false;
    const Tensor x = torch::rand({3}, torch::requires_grad());
    const Tensor y = checkpoint(
        {.early_stop = early_stop, .label = "short"},
        [&again](const Tensor& t) { return again ? t.exp() : t.exp().exp(); }, x);
    again = true;
    EXPECT_THAT(error_of<Error>([&] { y.sum().backward(); }),
                HasSubstr("checkpoint 'short': 2 tensors were saved in forward and 1 in the recomputation"));
  }
}

TEST(CheckpointErrors, MoreSavedTensorsAreAnErrorOnlyWithoutEarlyStop) {
  for (const bool early_stop : {true, false}) {
    bool again = false;
    const Tensor x = torch::rand({3}, torch::requires_grad());
    const Tensor y = checkpoint(
        {.early_stop = early_stop}, [&again](const Tensor& t) { return again ? t.exp().exp() : t.exp(); }, x);
    again = true;
    if (early_stop) {
      y.sum().backward();
      EXPECT_TRUE(torch::equal(x.grad(), x.detach().exp()));
    } else {
      EXPECT_THAT(error_of<Error>([&] { y.sum().backward(); }),
                  HasSubstr("checkpoint: 1 tensors were saved in forward and 2 in the recomputation"));
    }
  }
}

TEST(CheckpointErrors, AnInputThatIsWrittenBetweenForwardAndBackwardIsAnError) {
  // A leaf, a result of autograd, and a tensor without gradient.
  const Tensor leaf = torch::rand({3}, torch::requires_grad());
  const Tensor result = torch::rand({3}, torch::requires_grad()) + 1;
  const Tensor constant = torch::rand({3});
  const Tensor weight = torch::rand({3}, torch::requires_grad());
  for (const Tensor& input : {leaf, result, constant}) {
    const Tensor loss =
        checkpoint([](const Tensor& t, const Tensor& w) { return (t + 1).exp() * w; }, input, weight).sum();
    {
      const torch::NoGradGuard no_grad;
      input.add_(1);
    }
    EXPECT_THAT(error_of<c10::Error>([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"));
  }
}

TEST(CheckpointErrors, ACallableThatWritesToAnArgumentIsAnErrorAtOnce) {
  const Tensor weight = torch::rand({3}, torch::requires_grad());
  const Tensor constant = torch::rand({3});
  const Tensor result = torch::rand({3}, torch::requires_grad()) + 1;
  const auto write = [](const Tensor& w, const Tensor& t) {
    t.add_(1);
    return (t.clone() * w).exp();
  };
  for (const Tensor& input : {constant, result}) {
    EXPECT_THAT(error_of<ConfigError>([&] { checkpoint({.label = "writes"}, write, weight, input); }),
                AllOf(HasSubstr("checkpoint 'writes'"), HasSubstr("argument tensor 1")));
    EXPECT_TRUE(saving_is_plain());
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
      EXPECT_ANY_THROW(checkpoint(write, input));
    }
    EXPECT_EQ(live_bytes(torch::kCPU).count(), before) << throws;
  }
}

TEST(CheckpointErrors, BackwardThroughAnArgumentThatWasWrittenIsAnErrorThatSaysSo) {
  const Tensor input = torch::rand({3}, torch::requires_grad()) + 1;
  EXPECT_THROW(checkpoint([](const Tensor& t) { return t.exp_().sin(); }, input), ConfigError);
  EXPECT_THAT(error_of<Error>([&] { input.sum().backward(); }), HasSubstr("wrote to an argument"));
}

TEST(CheckpointErrors, AWeightThatIsWrittenBetweenForwardAndBackwardIsAnErrorAsWithoutCheckpoint) {
  for (const bool checkpointed : {false, true}) {
    const Tensor weight = torch::rand({3}, torch::requires_grad());
    const auto fn = [weight](const Tensor& t) { return (t * weight).sin(); };
    const Tensor x = torch::rand({3}, torch::requires_grad());
    const Tensor loss = (checkpointed ? checkpoint(fn, x) : fn(x)).sum();
    {
      const torch::NoGradGuard no_grad;
      weight.mul_(2);
    }
    EXPECT_THAT(error_of<c10::Error>([&] { loss.backward(); }), HasSubstr("modified by an inplace operation"))
        << checkpointed;
  }
}

TEST(CheckpointErrors, AnErrorInANestedRegionNamesTheInnerOne) {
  int calls = 0;
  const Tensor x = torch::rand({3}, torch::requires_grad());
  const auto inner = [&calls](const Tensor& t) { return ++calls == 3 ? t : t.exp().sin(); };
  const Tensor y = checkpoint(
      {.label = "outer"}, [inner](const Tensor& t) { return checkpoint({.label = "inner"}, inner, t.cos()).exp(); }, x);
  EXPECT_THAT(error_of<Error>([&] { y.sum().backward(); }), HasSubstr("checkpoint 'inner'"));
  EXPECT_TRUE(saving_is_plain());
}

TEST(CheckpointErrors, ACallableMaySwallowAllExceptionsAndStillBeRecomputed) {
  const Tensor x = torch::rand({3}, torch::requires_grad());
  const auto fn = [](const Tensor& t) {
    Tensor y = t;
    try {
      y = t.exp();
    } catch (...) {  // an early stop passes through here
    }
    return y;
  };
  const Tensor y = checkpoint(fn, x);
  y.sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), x.detach().exp()));
}

}  // namespace
}  // namespace snug::checkpoint_errors_test
