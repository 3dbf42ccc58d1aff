#include "src/memory/operator_mode.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
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

// A view of a library that is not LibTorch.
Tensor as_it_is(const Tensor& tensor) { return tensor.alias(); }
TORCH_LIBRARY(snug_operator_mode_test, library) {
  library.def("as_it_is(Tensor(a) x) -> Tensor(a)");
  library.impl("as_it_is", c10::DispatchKey::CPU, &as_it_is);
}

TEST(OperatorMode, DoesNotSeeLibTorchsViews) {
  const Tensor x = torch::ones({2, 3});
  const auto of_library = c10::Dispatcher::singleton()
                              .findSchemaOrThrow("snug_operator_mode_test::as_it_is", "")
                              .typed<Tensor(const Tensor&)>();
  Names names;
  const OperatorScope scope(names);
  (void)x.t().unsqueeze(0).expand({4, 3, 2}).slice(0, 1, 2).detach();
  (void)at::_unsafe_view(x, {6});
  EXPECT_TRUE(names.seen.empty());
  EXPECT_TRUE(of_library.call(x).is_alias_of(x));
  EXPECT_THAT(names.seen, ElementsAre("snug_operator_mode_test::as_it_is"));
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

TEST(OperatorMode, DoesNotSeeTensorsOnTheMetaDevice) {
  Names names;
  const OperatorScope scope(names);
  const Tensor x = torch::ones({2, 2}, torch::kMeta);
  (void)x.mm(x).relu_();
  EXPECT_TRUE(names.seen.empty());
  (void)torch::ones({2});
  EXPECT_FALSE(names.seen.empty());
}

TEST(OperatorMode, TellsAPolicyThatItWasSwitchedOff) {
  class Told final : public OperatorPolicy {
   public:
    void call(const OperatorCall& call, Stack& stack) override { call.proceed(stack); }
    void was_switched_off() override { ++times; }
    int times = 0;
  };
  Told told;
  {
    const OperatorScope scope(told);
  }
  EXPECT_EQ(told.times, 0);
  {
    const OperatorScope scope(told);
    c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::Fake, false);
  }
  EXPECT_EQ(told.times, 1);
}

// --- with another library's kernel for the same key

int others_calls = 0;
void of_another_library(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  ++others_calls;
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Fake), stack);
}

Tensor with_others_key() {
  const Tensor x = torch::ones({2});
  return at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(x.storage()), c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::Fake}), x.dtype());
}

int calls_beside_another_library() {
  const auto registered = c10::Dispatcher::singleton().registerFallback(
      c10::DispatchKey::Fake, c10::KernelFunction::makeFromBoxedFunction<&of_another_library>(), "another library");
  Names names;
  const auto expect = [](bool holds, const char* what) {
    if (!holds) {
      std::fprintf(stderr, "%s\n", what);
      std::exit(1);
    }
  };
  {
    const OperatorScope scope(names);
    (void)torch::ones({2}).exp();
    expect(std::count(names.seen.begin(), names.seen.end(), "aten::exp") == 1, "the scope sees other tensors");
    expect(others_calls == 0, "which are not theirs");
    (void)with_others_key().exp();
    expect(others_calls == 1, "theirs are theirs inside a scope");
    expect(std::count(names.seen.begin(), names.seen.end(), "aten::exp") == 1, "and are not seen");
  }
  (void)with_others_key().exp();
  expect(others_calls == 2, "and outside of it");
  (void)torch::ones({2}).exp();
  expect(others_calls == 2, "others are nobody's");
  std::exit(0);
}

TEST(OperatorMode, SharesItsKeyWithAKernelThatWasThereBefore) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process in which snug has registered nothing yet
  EXPECT_EXIT(calls_beside_another_library(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace snug::detail::operator_mode_test
