#include "src/memory/held.h"

#include <gtest/gtest.h>
#include <torch/types.h>

namespace snug::detail::held_test {
namespace {

TEST(WriteCount, IsSharedByViewsAndAliasesAndNotByPartsOfAnUnsafeChunk) {
  const auto x = torch::ones({4, 4});
  EXPECT_EQ(WriteCount::counter_of(x), WriteCount::counter_of(x.view({16})));
  EXPECT_EQ(WriteCount::counter_of(x), WriteCount::counter_of(x.detach()));
  const auto parts = x.unsafe_chunk(2);
  EXPECT_EQ(parts[0].storage().unsafeGetStorageImpl(), parts[1].storage().unsafeGetStorageImpl());
  EXPECT_NE(WriteCount::counter_of(parts[0]), WriteCount::counter_of(parts[1]));
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
}  // namespace snug::detail::held_test
