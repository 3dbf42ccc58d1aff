#include "snug/memory/detail/operator_mode.h"

#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <torch/torch.h>

namespace snug::detail::operator_mode_test {
namespace {

using ::testing::ElementsAre;
using torch::Tensor;

class Names final : public OperatorPolicy {
 public:
  void call(const OperatorCall& call, Stack& stack) override {
    seen.push_back(call.op.schema().name());
    call.proceed(stack);
  }
  std::vector<std::string> seen;
};

/// Runs a product twice, and gives its results' sum.
class Twice final : public OperatorPolicy {
 public:
  void call(const OperatorCall& call, Stack& stack) override {
    const Stack arguments(stack.end() - static_cast<int64_t>(call.op.schema().arguments().size()), stack.end());
    call.proceed(stack);
    if (call.op.schema().name() == "aten::mm") {
      Stack again = arguments;
      call.proceed(again);
      stack.back() = stack.back().toTensor() + again.back().toTensor();
    }
  }
};

TEST(OperatorMode, SeesOperatorsBelowAutogradInForwardAndBackward) {
  const Tensor x = torch::rand({2, 3}, torch::requires_grad());
  const Tensor w = torch::rand({3, 4});
  Names names;
  Tensor loss;
  {
    const OperatorScope scope(names);
    loss = torch::matmul(x, w).relu().sum();
  }
  EXPECT_THAT(names.seen, ElementsAre("aten::mm", "aten::relu", "aten::sum")) << "matmul in its parts";
  names.seen.clear();
  {
    const OperatorScope scope(names);
    loss.backward();
  }
  EXPECT_THAT(names.seen, ::testing::Contains("aten::threshold_backward"));
  names.seen.clear();
  (void)(x * 2);
  EXPECT_TRUE(names.seen.empty()) << "the scope has ended";
}

TEST(OperatorMode, ChangesNoValueAndNoGraph) {
  const Tensor x = torch::rand({2, 3}, torch::requires_grad());
  Names names;
  const OperatorScope scope(names);
  const Tensor y = x.exp();
  EXPECT_EQ(y.grad_fn()->name(), "ExpBackward0");
  EXPECT_EQ(x._version(), 0);
}

TEST(OperatorMode, AsksTheInnerPolicyFirstAndGivesTheOuterOneWhatItCalls) {
  const Tensor a = torch::ones({2, 2});
  Names outer;
  Twice inner;
  const OperatorScope outside(outer);
  Tensor product;
  {
    const OperatorScope inside(inner);
    product = a.mm(a);
  }
  EXPECT_THAT(outer.seen, ElementsAre("aten::mm", "aten::mm", "aten::add"));
  EXPECT_TRUE(torch::equal(product, torch::full({2, 2}, 4.0)));
}

TEST(OperatorMode, IsOfOneThread) {
  Names names;
  const OperatorScope scope(names);
  std::thread([] { (void)torch::ones({2}); }).join();
  EXPECT_TRUE(names.seen.empty());
}

TEST(OperatorMode, EndsWithItsScopeWhenAnOperatorThrows) {
  Names names;
  try {
    const OperatorScope scope(names);
    (void)torch::ones({2, 3}).mm(torch::ones({2, 3}));
    FAIL();
  } catch (const c10::Error&) {
  }
  names.seen.clear();
  (void)torch::ones({2});
  EXPECT_TRUE(names.seen.empty());
}

}  // namespace
}  // namespace snug::detail::operator_mode_test
