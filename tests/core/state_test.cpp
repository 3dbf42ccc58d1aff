#include "snug/state.h"

#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"

namespace snug::state_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

StateDict example() {
  StateDict inner;
  inner.set("flag", true);
  StateDict state;
  state.set("step", int64_t{12});
  state.set("lr", 0.5);
  state.set("name", std::string("adam"));
  state.set("weight", at::ones({2}));
  state.set("inner", inner);
  return state;
}

TEST(StateDict, GivesBackWhatWasSet) {
  const StateDict state = example();
  EXPECT_EQ(state.get<int64_t>("step"), 12);
  EXPECT_EQ(state.get<double>("lr"), 0.5);
  EXPECT_EQ(state.get<std::string>("name"), "adam");
  EXPECT_EQ(state.get<at::Tensor>("weight").numel(), 2);
  EXPECT_TRUE(state.get<StateDict>("inner").get<bool>("flag"));
  EXPECT_EQ(state.size(), 5u);
  EXPECT_FALSE(state.empty());
  EXPECT_TRUE(StateDict().empty());
  EXPECT_TRUE(state.contains("lr"));
  EXPECT_FALSE(state.contains("flag"));
}

TEST(StateDict, KeepsTheOrderOfTheFirstSet) {
  StateDict state = example();
  state.set("step", int64_t{13});
  ASSERT_EQ(state.size(), 5u);
  EXPECT_EQ(state.entries().front().name, "step");
  EXPECT_EQ(state.get<int64_t>("step"), 13);
  EXPECT_EQ(state.entries().back().name, "inner");
}

TEST(StateDict, HoldsTensorsByReference) {
  const at::Tensor weight = at::ones({2});
  StateDict state;
  state.set("weight", weight);
  EXPECT_TRUE(state.get<at::Tensor>("weight").is_same(weight));
}

TEST(StateDict, IsCopiedWithAllThatIsNested) {
  StateDict original = example();
  StateDict copy = original;
  original.set("inner", StateDict());
  EXPECT_TRUE(copy.get<StateDict>("inner").contains("flag"));
  const StateDict moved = std::move(copy);
  EXPECT_EQ(moved.size(), 5u);
}

TEST(StateDict, NamesTheEntriesThatAreThereWhenOneIsNot) {
  const StateDict state = example();
  EXPECT_THAT([&] { state.get<double>("lrr"); },
              ThrowsMessage<CorruptFile>(AllOf(HasSubstr("'lrr'"), HasSubstr("step, lr, name, weight, inner"))));
  EXPECT_THAT([] { StateDict().at("x"); }, ThrowsMessage<CorruptFile>(HasSubstr("'x'")));
}

TEST(StateDict, NamesTheEntryOfAnotherType) {
  const StateDict state = example();
  EXPECT_THAT([&] { state.get<double>("step"); },
              ThrowsMessage<CorruptFile>(AllOf(HasSubstr("'step'"), HasSubstr("type"))));
}

}  // namespace
}  // namespace snug::state_test
