#include <any>
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

namespace snug::saved_tensors_test {
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

TEST(SavedTensorHooks, ThatKeepTheTensorGiveGradientsEqualToTheBit) {
  EXPECT_TRUE(same_bits(gradients_with(&keep, &give), plain_gradients()));
}

TEST(SavedTensorHooks, ThatKeepACopyGiveGradientsEqualToTheBit) {
  EXPECT_TRUE(same_bits(gradients_with([](const Tensor& t) { return std::any(t.clone()); }, &give), plain_gradients()));
}

TEST(SavedTensorHooks, ThatKeepAWiderTypeGiveGradientsEqualToTheBit) {
  const auto widen = [](const Tensor& t) { return std::any(t.to(torch::kDouble)); };
  const auto narrow = [](std::any& kept) { return std::any_cast<Tensor&>(kept).to(torch::kFloat); };
  EXPECT_TRUE(same_bits(gradients_with(widen, narrow), plain_gradients()));
}

// The example at the top of saved_tensors.h.
TEST(SavedTensorHooks, TheExampleKeepsIntegersAndBFloat16AsTheyAre) {
  const auto pack = [](const Tensor& t) {
    return std::any(std::pair(t.dtype() == torch::kFloat ? t.to(torch::kBFloat16) : t.detach(), t.scalar_type()));
  };
  const auto unpack = [](std::any& kept) {
    const auto& [tensor, dtype] = std::any_cast<std::pair<Tensor, torch::ScalarType>&>(kept);
    return tensor.to(dtype);
  };
  const auto gradient = [&](bool hooked, torch::ScalarType dtype) {
    std::optional<SavedTensorHooks> hooks;
    if (hooked) {
      hooks.emplace(pack, unpack);
    }
    // Of values that BF16 holds exactly.
    const Tensor table = torch::arange(12, torch::kFloat).view({4, 3}).to(dtype).requires_grad_();
    const Tensor factor = torch::ones({2, 3}, dtype).mul_(0.5).requires_grad_();
    const Tensor rows = torch::embedding(table, torch::tensor({1, 3}));
    (rows * factor).sum().backward();
    return std::vector{table.grad(), factor.grad()};
  };
  for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
    EXPECT_TRUE(same_bits(gradient(true, dtype), gradient(false, dtype))) << dtype;
  }
}

TEST(SavedTensorHooks, BackwardComputesWithWhatUnpackGives) {
  torch::manual_seed(2);
  const Tensor a = torch::randn({100}, torch::requires_grad());
  const Tensor b = torch::randn({100}, torch::requires_grad());
  Tensor product;
  {
    const SavedTensorHooks in_bf16([](const Tensor& t) { return std::any(t.to(torch::kBFloat16)); },
                                   [](std::any& kept) { return std::any_cast<Tensor&>(kept).to(torch::kFloat); });
    product = a * b;
  }
  EXPECT_TRUE(same_bits(product, a.detach() * b.detach())) << "the forward is not touched";
  product.sum().backward();
  EXPECT_TRUE(same_bits(a.grad(), b.detach().to(torch::kBFloat16).to(torch::kFloat)));
  EXPECT_TRUE(same_bits(b.grad(), a.detach().to(torch::kBFloat16).to(torch::kFloat)));
}

TEST(SavedTensorHooks, SeeEverySavedTensorOnceInEachDirection) {
  int packed = 0;
  int unpacked = 0;
  const Tensor a = torch::rand({3}, torch::requires_grad());
  const Tensor b = torch::rand({3}, torch::requires_grad());
  Tensor y;
  {
    const SavedTensorHooks hooks(
        [&](const Tensor& t) {
          ++packed;
          return keep(t);
        },
        [&](std::any& kept) {
          ++unpacked;
          return give(kept);
        });
    y = (a * b).exp();  // the product saves a and b, exp its result
  }
  EXPECT_EQ(packed, 3);
  EXPECT_EQ(unpacked, 0);
  y.sum().backward();
  EXPECT_EQ(packed, 3);
  EXPECT_EQ(unpacked, 3);
}

TEST(SavedTensorHooks, OnlyTheInnermostAreAskedAndTheOuterOnesAfterwards) {
  std::vector<std::string> asked;
  const auto hooks_named = [&](const std::string& name) {
    return [&asked, name](const Tensor& t) {
      asked.push_back(name);
      return keep(t);
    };
  };
  const Tensor a = torch::rand({3}, torch::requires_grad());
  const SavedTensorHooks outer(hooks_named("outer"), &give);
  Tensor y = a.exp();
  {
    const SavedTensorHooks inner(hooks_named("inner"), &give);
    y = y.exp();
    const detail::PolicyScope none(nullptr);
    y = y.exp();
  }
  y = y.exp();
  EXPECT_EQ(asked, (std::vector<std::string>{"outer", "inner", "outer"}));
  y.sum().backward();
  const Tensor e1 = a.detach().exp(), e2 = e1.exp(), e3 = e2.exp(), e4 = e3.exp();
  EXPECT_TRUE(same_bits(a.grad(), ((torch::ones({3}) * e4) * e3) * e2 * e1));
}

TEST(SavedTensorHooks, EndWithTheirScopeEvenIfTheForwardThrows) {
  int packed = 0;
  const Tensor a = torch::rand({3}, torch::requires_grad());
  try {
    const SavedTensorHooks hooks(
        [&](const Tensor& t) {
          ++packed;
          return keep(t);
        },
        &give);
    a.exp();
    throw std::runtime_error("in the middle");
  } catch (const std::runtime_error&) {
  }
  a.exp();
  EXPECT_EQ(packed, 1);
}

// What autograd refuses without hooks, it must refuse with them: torch leaves its check out where there are hooks.
TEST(SavedTensorHooks, AResultThatIsWrittenInPlaceIsAnErrorInBackwardAsWithoutHooks) {
  const auto write_and_go_back = [] {
    const Tensor a = torch::rand({3}, torch::requires_grad());
    const Tensor y = a.exp();
    y.add_(1);
    y.sum().backward();
  };
  EXPECT_THAT(error_of<c10::Error>(write_and_go_back), HasSubstr("modified by an inplace operation"));
  const SavedTensorHooks hooks(&keep, &give);
  EXPECT_THAT(error_of<c10::Error>(write_and_go_back), HasSubstr("modified by an inplace operation"));
}

TEST(SavedTensorHooks, AnOperandThatIsWrittenInPlaceIsAnErrorEvenIfTheHooksKeptACopy) {
  const SavedTensorHooks hooks([](const Tensor& t) { return std::any(t.clone()); }, &give);
  const Tensor a = torch::rand({3}, torch::requires_grad());
  const Tensor b = torch::rand({3});
  const Tensor view_of_b = b.slice(0, 0, 1);
  const Tensor y = (a * b).sum();
  view_of_b.zero_();
  const auto message = error_of<c10::Error>([&] { y.backward(); });
  EXPECT_THAT(message, HasSubstr("modified by an inplace operation"));
  EXPECT_THAT(message, HasSubstr("version 1; expected version 0"));
}

TEST(SavedTensorHooks, APackThatWritesToItsArgumentIsAnError) {
  const SavedTensorHooks hooks(
      [](const Tensor& t) {
        t.zero_();
        return std::any(t.clone());
      },
      &give);
  const Tensor a = torch::rand({3}, torch::requires_grad());
  EXPECT_THROW(a.exp(), c10::Error);
}

TEST(SavedTensorHooks, ErrorsOfPackAndUnpackReachTheCaller) {
  const Tensor a = torch::rand({3}, torch::requires_grad());
  {
    const SavedTensorHooks hooks([](const Tensor&) -> std::any { throw Error("pack says no"); }, &give);
    EXPECT_EQ(error_of<Error>([&] { a.exp(); }), "pack says no");
  }
  Tensor y;
  {
    const SavedTensorHooks hooks(&keep, [](std::any&) -> Tensor { throw Error("unpack says no"); });
    y = a.exp().sum();
  }
  EXPECT_EQ(error_of<Error>([&] { y.backward(); }), "unpack says no");
}

TEST(SavedTensorHooks, AnEmptyFunctionIsAnError) {
  EXPECT_THROW(SavedTensorHooks(nullptr, &give), ConfigError);
  EXPECT_THROW(SavedTensorHooks(&keep, nullptr), ConfigError);
  const Tensor a = torch::rand({3}, torch::requires_grad());
  EXPECT_NO_THROW(a.exp().sum().backward()) << "hooks that were refused must not be asked";
}

TEST(SavedTensorHooks, WorkWithDoubleBackward) {
  const Tensor x = torch::tensor({2.0, 3.0}, torch::requires_grad());
  const SavedTensorHooks hooks(&keep, &give);
  const Tensor y = (x * x * x).sum();
  const Tensor first = torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true).front();
  EXPECT_TRUE(torch::equal(first, torch::tensor({12.0, 27.0})));
  const Tensor second = torch::autograd::grad({first.sum()}, {x}, {}, true, true).front();
  EXPECT_TRUE(torch::equal(second, torch::tensor({12.0, 18.0})));
  const Tensor third = torch::autograd::grad({second.sum()}, {x}).front();
  EXPECT_TRUE(torch::equal(third, torch::tensor({6.0, 6.0})));
}

TEST(SavedTensorHooks, UnpackAgainForEveryBackwardOfARetainedGraph) {
  int unpacked = 0;
  const Tensor a = torch::rand({3}, torch::requires_grad());
  Tensor y;
  {
    const SavedTensorHooks hooks(&keep, [&](std::any& kept) {
      ++unpacked;
      return give(kept);
    });
    y = a.exp().sum();
  }
  y.backward({}, /*retain_graph=*/true);
  const Tensor once = a.grad().clone();
  y.backward();
  EXPECT_EQ(unpacked, 2);
  EXPECT_TRUE(same_bits(a.grad(), once + once));
  EXPECT_THROW(y.backward(), c10::Error) << "the graph was not retained the second time";
}

TEST(SavedTensorHooks, WorkWithModulesUsedTwiceAndViewsAndBroadcasts) {
  const auto gradient = [] {
    torch::manual_seed(3);
    auto layer = torch::nn::Linear(4, 4);
    const Tensor x = torch::randn({2, 3, 4}, torch::requires_grad());
    const Tensor h = layer->forward(x).transpose(1, 2).contiguous();
    (torch::matmul(h.sigmoid(), layer->forward(x.tanh())) * x[0][0][0]).pow(2).sum().backward();
    auto all = gradients_of(*layer);
    all.push_back(x.grad());
    return all;
  };
  const auto plain = gradient();
  const SavedTensorHooks hooks([](const Tensor& t) { return std::any(t.clone()); }, &give);
  EXPECT_TRUE(same_bits(gradient(), plain));
}

TEST(SavedTensorHooks, BelongToTheirThread) {
  int here = 0;
  const SavedTensorHooks hooks(
      [&](const Tensor& t) {
        ++here;
        return keep(t);
      },
      &give);
  std::thread([] {
    const Tensor a = torch::rand({3}, torch::requires_grad());
    a.exp().sum().backward();
  }).join();
  EXPECT_EQ(here, 0);
}

TEST(SavedTensorHooks, WorkOnSeveralThreadsAtOnce) {
  constexpr int kThreads = 4;
  std::vector<std::vector<Tensor>> gradients(kThreads);
  std::vector<int> packed(kThreads, 0);
  const auto expected = plain_gradients();
  std::vector<torch::nn::Sequential> models;
  for (int i = 0; i < kThreads; ++i) {
    models.push_back(make_model());
  }
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < 50; ++round) {
        models[i]->zero_grad();
        const SavedTensorHooks hooks(
            [&](const Tensor& t) {
              ++packed[i];
              return keep(t);
            },
            &give);
        models[i]->forward(torch::ones({4, 6})).sum().backward();
      }
      gradients[i] = gradients_of(*models[i]);
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  for (size_t i = 0; i < kThreads; ++i) {
    EXPECT_TRUE(same_bits(gradients[i], expected)) << i;
    EXPECT_EQ(packed[i], packed[0]);
    EXPECT_GT(packed[i], 0);
  }
}

TEST(SavedTensorHooks, ReleaseWhatTheyKeptWithTheGraph) {
  const int64_t before = live_bytes(torch::kCPU).count();
  {
    const Tensor a = torch::rand({1000}, torch::requires_grad());
    const SavedTensorHooks hooks(&keep, &give);
    const Tensor y = a.exp().exp();  // saved by the node that made it: a cycle, were the tensor itself kept
  }
  EXPECT_EQ(live_bytes(torch::kCPU).count(), before);
}

}  // namespace
}  // namespace snug::saved_tensors_test
