#include "snug/memory/detail/held.h"

#include <gtest/gtest.h>
#include <torch/types.h>

namespace snug::detail {
namespace {

TEST(Held, IsTheSameForViewsAndAliasesUntilOneIsWritten) {
  const auto x = torch::ones({4, 4});
  const Held before(x);
  EXPECT_TRUE(before.is_same(Held(x.view({16}))));
  EXPECT_TRUE(before.is_same(Held(x.detach())));
  EXPECT_FALSE(before.is_same(Held(torch::ones({4, 4}))));
  x.select(0, 1).add_(1);
  EXPECT_FALSE(before.is_same(Held(x)));
}

TEST(Held, TellsPartsWithACounterEachApart) {
  const auto parts = torch::ones({4, 4}).unsafe_chunk(2);
  EXPECT_EQ(parts[0].storage().unsafeGetStorageImpl(), parts[1].storage().unsafeGetStorageImpl());
  parts[0].add_(1);
  parts[1].add_(1);
  EXPECT_EQ(parts[0]._version(), parts[1]._version());
  EXPECT_FALSE(Held(parts[0]).is_same(Held(parts[1])));
}

TEST(Held, AsksForTheOperatorsThatWroteWhereSomebodyCountsThem) {
  const auto x = torch::ones({4});
  EXPECT_FALSE(Held(x, 1).is_same(Held(x, 2)));
}

TEST(Held, KeepsTheAddressNotTheMemory) {
  auto x = torch::ones({4});
  const Held held(x);
  x = torch::Tensor();
  EXPECT_FALSE(held.storage());
}

TEST(WriteCount, MovesByWritesThatNoOperatorExplains) {
  const auto x = torch::ones({4});
  WriteCount count(x);
  EXPECT_FALSE(count.moved());
  count.expect();
  x.add_(1);
  EXPECT_FALSE(count.moved());
  count.expect();
  EXPECT_FALSE(count.moved());  // autograd counted nothing, as below it
  x.unsafeGetTensorImpl()->bump_version();
  x.unsafeGetTensorImpl()->bump_version();
  EXPECT_TRUE(count.moved());
  count.accept();
  EXPECT_FALSE(count.moved());
}

TEST(WriteCount, RemembersAWriteThatALaterOperatorFollows) {
  const auto x = torch::ones({4});
  WriteCount count(x);
  x.unsafeGetTensorImpl()->bump_version();
  count.expect();
  x.add_(1);
  EXPECT_TRUE(count.moved());
}

TEST(WriteCount, NeverMovesWhereNobodyCounts) {
  at::Tensor x;
  {
    const c10::InferenceMode inference;
    x = torch::ones({4});
  }
  WriteCount count(x);
  EXPECT_EQ(count.counter(), nullptr);
  count.expect();
  EXPECT_FALSE(count.moved());
  EXPECT_FALSE(WriteCount().moved());
}

}  // namespace
}  // namespace snug::detail
