#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/state.h"
#include "tests/support/tensors.h"

namespace snug::rng_test {
namespace {

using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;

TEST(RngState, GivesTheSameNumbersAgain) {
  const auto state = RngState::capture();
  const Tensor uniform = torch::rand({100});
  const Tensor normal = torch::randn({33});  // an odd number: the generator keeps half a pair of normals
  const Tensor one_normal = torch::randn({});
  const Tensor order = torch::randperm(50);
  state.restore();
  EXPECT_TRUE(same_bits(torch::rand({100}), uniform));
  EXPECT_TRUE(same_bits(torch::randn({33}), normal));
  EXPECT_TRUE(same_bits(torch::randn({}), one_normal));
  EXPECT_TRUE(same_bits(torch::randperm(50), order));
}

TEST(RngState, GivesTheSecondOfAPairOfNormalsToo) {
  torch::manual_seed(3);
  torch::randn({}, torch::kDouble);
  const auto state = RngState::capture();
  const Tensor next = torch::randn({}, torch::kDouble);
  state.restore();
  EXPECT_TRUE(same_bits(torch::randn({}, torch::kDouble), next));
}

TEST(RngState, MayBeRestoredAnyNumberOfTimesAndIsNotUsedUp) {
  const auto state = RngState::capture();
  const Tensor expected = torch::rand({7});
  for (int i = 0; i < 3; ++i) {
    torch::manual_seed(99);
    torch::rand({1000});
    state.restore();
    EXPECT_TRUE(same_bits(torch::rand({7}), expected));
  }
}

TEST(RngState, CapturingDrawsNothing) {
  torch::manual_seed(4);
  const Tensor expected = torch::rand({7});
  torch::manual_seed(4);
  RngState::capture();
  EXPECT_TRUE(same_bits(torch::rand({7}), expected));
}

TEST(RngState, GoesThroughAStateDict) {
  torch::manual_seed(5);
  torch::rand({3});
  const StateDict saved = RngState::capture().state_dict();
  const Tensor expected = torch::rand({7});
  torch::manual_seed(6);
  RngState::from_state_dict(saved).restore();
  EXPECT_TRUE(same_bits(torch::rand({7}), expected));
}

TEST(RngState, WithoutTheCpusStateIsAnError) {
  EXPECT_THAT(testing::error_of<CorruptFile>([] { RngState::from_state_dict(StateDict()); }), HasSubstr("'cpu'"));
}

TEST(RngState, ThatNoGeneratorWouldTakeIsAnErrorBeforeAnythingIsRestored) {
  const StateDict good = RngState::capture().state_dict();
  const Tensor cpu = good.get<Tensor>("cpu");
  torch::manual_seed(8);
  const Tensor expected = torch::rand({7});
  torch::manual_seed(8);
  for (const Tensor& bad : {Tensor(), torch::empty({0}, torch::kUInt8), cpu.slice(0, 1), cpu.to(torch::kFloat)}) {
    StateDict dict;
    dict.set("cpu", bad);
    EXPECT_THAT(testing::error_of<CorruptFile>([&] { RngState::from_state_dict(dict).restore(); }), HasSubstr("'cpu'"));
  }
  EXPECT_TRUE(same_bits(torch::rand({7}), expected));
}

TEST(RngState, KeepsItsStateWhateverIsDrawnOrSavedFromIt) {
  const auto state = RngState::capture();
  const Tensor expected = torch::rand({7});
  const StateDict dict = state.state_dict();
  const Tensor bytes = dict.get<Tensor>("cpu").clone();
  state.restore();
  torch::rand({1000});
  EXPECT_TRUE(same_bits(dict.get<Tensor>("cpu"), bytes));
  state.restore();
  EXPECT_TRUE(same_bits(torch::rand({7}), expected));
}

TEST(RngState, OfADeviceThatIsAbsentIsPassedOver) {
  StateDict saved = RngState::capture().state_dict();
  saved.set("cuda:99", torch::zeros({16}, torch::kUInt8));
  const Tensor expected = torch::rand({7});
  RngState::from_state_dict(saved).restore();
  EXPECT_TRUE(same_bits(torch::rand({7}), expected));
}

}  // namespace
}  // namespace snug::rng_test
