#include <chrono>
#include <future>
#include <map>
#include <string>
#include <thread>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "snug/snapshot.h"
#include "tests/support/failing_file_system.h"
#include "tests/support/forwarding_file_system.h"
#include "tests/support/temporary_folder.h"

namespace snug::async_snapshots_test {
namespace {

using testing::FailingFileSystem;
using testing::ForwardingFileSystem;
using ::testing::HasSubstr;
using testing::TemporaryFolder;
using ::testing::ThrowsMessage;

// Whose files are not written until they may be.
class ClosedFileSystem final : public ForwardingFileSystem {
 public:
  void write_file(const Path& path, std::span<const std::string_view> parts, std::span<const int64_t> places) override {
    is_open_.wait();
    ForwardingFileSystem::write_file(path, parts, places);
  }
  void open() { opening_.set_value(); }

 private:
  std::promise<void> opening_;
  std::shared_future<void> is_open_ = opening_.get_future().share();
};

// One tensor and one number.
struct Part {
  at::Tensor tensor = at::zeros({1000});
  int64_t number = 0;

  std::map<std::string, Stateful> parts() {
    return {{"part",
             {[this] {
                StateDict inner, state;
                inner.set("number", number);
                state.set("tensor", tensor);
                state.set("inner", inner);
                return state;
              },
              [this](const StateDict& state) {
                tensor = state.get<at::Tensor>("tensor").clone();
                number = state.get<StateDict>("inner").get<int64_t>("number");
              }}}};
  }
};

TEST(AsyncSnapshots, SaveTheStateAsItWasWhateverIsDoneWithItMeanwhile) {
  const TemporaryFolder folder;
  ClosedFileSystem files;
  SnapshotStore store(folder.path(), {}, files);
  Part part;
  {
    AsyncSnapshots saving(store);
    saving.save(1, part.parts());
    part.tensor.fill_(7);
    part.number = 7;
    EXPECT_EQ(store.latest(), std::nullopt) << "it cannot be there";
    files.open();
    saving.save(2, part.parts());  // waits for the first
    saving.wait();
    EXPECT_EQ(saving.report().saved, 2);
    EXPECT_EQ(saving.report().at_once, 0);
  }
  Part second;
  EXPECT_EQ(store.load_latest(second.parts()), 2);
  EXPECT_EQ(second.number, 7);
  store.set_aside(2);
  EXPECT_EQ(store.load_latest(second.parts()), 1);
  EXPECT_EQ(second.number, 0);
  EXPECT_TRUE(at::equal(second.tensor, at::zeros({1000})));
}

TEST(AsyncSnapshots, HoldTheirCopiesNoLongerThanTheyWrite) {
  const TemporaryFolder folder;
  SnapshotStore store(folder.path());
  Part part;
  const Bytes before = live_bytes(at::kCPU);
  AsyncSnapshots saving(store);
  saving.save(1, part.parts());
  for (int tries = 0; tries < 2000 && live_bytes(at::kCPU) > before; ++tries) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_EQ(live_bytes(at::kCPU), before) << "though nobody has waited for the save";
}

TEST(AsyncSnapshots, AreWrittenBeforeTheyEnd) {
  const TemporaryFolder folder;
  SnapshotStore store(folder.path());
  Part part;
  AsyncSnapshots(store).save(3, part.parts());
  EXPECT_EQ(store.latest(), 3);
}

TEST(AsyncSnapshots, TellOfAnErrorAtTheNextCallAndCanGoOn) {
  const TemporaryFolder folder;
  FailingFileSystem files({.fail_at = 3});
  SnapshotStore store(folder.path(), {}, files);
  Part part;
  AsyncSnapshots saving(store);
  saving.save(1, part.parts());
  EXPECT_THROW(saving.wait(), Error);
  EXPECT_EQ(store.latest(), std::nullopt);
  saving.wait();
  saving.save(2, part.parts());
  saving.save(1, part.parts());
  EXPECT_THAT([&] { saving.wait(); }, ThrowsMessage<ConfigError>(HasSubstr("step 1")));
  EXPECT_EQ(store.latest(), 2);
}

TEST(AsyncSnapshots, AreWrittenAtOnceWhereThereIsNoMemoryToCopy) {
  const TemporaryFolder folder;
  ClosedFileSystem files;
  files.open();
  SnapshotStore store(folder.path(), {}, files);
  Part part;
  AsyncSnapshots saving(store);
  {
    const MemoryLimit limit(at::kCPU, live_bytes(at::kCPU));
    saving.save(1, part.parts());
    EXPECT_EQ(store.latest(), 1) << "before save() returned";
  }
  EXPECT_EQ(saving.report().at_once, 1);
  EXPECT_THAT(saving.report().str(), HasSubstr("for 1 there was no memory"));
}

}  // namespace
}  // namespace snug::async_snapshots_test
