// Where the bytes of a storage are, without a tape.

#include "src/remat/holding.h"

#include <utility>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace snug::holding_test {
namespace {

using detail::Holding;

constexpr int64_t kBytes = 64;

c10::Storage storage() { return torch::empty({kBytes}, torch::kUInt8).storage(); }

c10::DataPtr memory_of(c10::Storage&& of) { return of.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr()); }

TEST(Holding, FindsAStorageAsLongAsAnybodyHoldsIt) {
  c10::Storage memory = storage();
  const auto* const address = memory.unsafeGetStorageImpl();
  Holding holding(memory);
  EXPECT_FALSE(holding.is_own());
  EXPECT_EQ(holding.find().unsafeGetStorageImpl(), address);
  holding.hold(std::exchange(memory, {}));
  EXPECT_TRUE(holding.is_own() && !holding.is_parked());
  EXPECT_EQ(holding.find().unsafeGetStorageImpl(), address);
  EXPECT_EQ(holding.release(kBytes).unsafeGetStorageImpl(), address);
  EXPECT_FALSE(holding.is_own() || holding.is_in_use() || holding.find());
}

TEST(Holding, GivesParkedMemoryBackInAStorage) {
  c10::Storage memory = storage();
  const void* const bytes = memory.data();
  Holding holding(memory);
  holding.park(memory_of(std::exchange(memory, {})));
  EXPECT_TRUE(holding.is_own() && holding.is_parked());
  EXPECT_FALSE(holding.find());
  const c10::Storage again = holding.release(kBytes);
  EXPECT_EQ(again.data(), bytes);
  EXPECT_EQ(again.nbytes(), static_cast<size_t>(kBytes));
  EXPECT_FALSE(holding.is_own());
}

TEST(Holding, ForgetsWhatWasParkedWhereTheSameWasRebuilt) {
  c10::Storage memory = storage();
  Holding holding(memory);
  holding.park(memory_of(std::exchange(memory, {})));
  const c10::Storage rebuilt = storage();
  holding.hold(rebuilt);
  EXPECT_FALSE(holding.is_parked());
  EXPECT_EQ(holding.release(kBytes).unsafeGetStorageImpl(), rebuilt.unsafeGetStorageImpl());
  EXPECT_FALSE(holding.is_own());
}

}  // namespace
}  // namespace snug::holding_test
