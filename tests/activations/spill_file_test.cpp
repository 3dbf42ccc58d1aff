#include "src/activations/spill_file.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "snug/core.h"
#include "tests/support/temporary_folder.h"

// No torch here, so that the sanitizers can say something of the threads.

namespace snug::detail::spill_file_test {
namespace {

using snug::testing::TemporaryFolder;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kBytes = 100'000;
constexpr int64_t kUnlimited = int64_t{1} << 60;

// Memory that is counted while it lives.
std::atomic<int64_t> live_blocks{0};
SpillMemory allocate(int64_t bytes) {
  ++live_blocks;
  const std::shared_ptr<char[]> block(new char[static_cast<size_t>(bytes)], [](char* data) {
    delete[] data;
    --live_blocks;
  });
  return {block, block.get(), bytes};
}

SpillMemory filled(char value, int64_t bytes = kBytes) {
  SpillMemory memory = allocate(bytes);
  std::memset(memory.data, value, static_cast<size_t>(bytes));
  return memory;
}

// What load() gives is all `value`.
::testing::AssertionResult holds(char value, const SpillMemory& memory, int64_t bytes = kBytes) {
  const auto* data = static_cast<const char*>(memory.data);
  if (memory.bytes != bytes) {
    return ::testing::AssertionFailure() << memory.bytes << " bytes instead of " << bytes;
  }
  const auto other = std::find_if(data, data + bytes, [&](char c) { return c != value; });
  return other == data + bytes ? ::testing::AssertionSuccess()
                               : ::testing::AssertionFailure() << "byte " << (other - data) << " is " << int(*other);
}

// System calls that fail on demand, move little, or wait.
class Faults final : public SpillCalls {
 public:
  std::atomic<int> write_error{0}, read_error{0};
  std::atomic<size_t> at_most{size_t{1} << 30};
  std::atomic<bool> lose_bytes{false};
  std::atomic<int> asked_to_write{0}, writes{0}, reads{0}, truncations{0};

  ssize_t pwrite(int file, const void* data, size_t size, off_t offset) override {
    ++asked_to_write;
    {
      std::unique_lock lock(mutex_);
      opened_.wait(lock, [&] { return open_; });
    }
    if (++writes % 3 == 0 && at_most < size) {
      errno = EINTR;
      return -1;
    }
    if (write_error != 0) {
      errno = write_error;
      return -1;
    }
    const size_t some = std::min(size, at_most.load());
    return lose_bytes ? static_cast<ssize_t>(some) : SpillCalls::pwrite(file, data, some, offset);
  }
  ssize_t pread(int file, void* data, size_t size, off_t offset) override {
    ++reads;
    if (read_error != 0) {
      errno = read_error;
      return -1;
    }
    return SpillCalls::pread(file, data, std::min(size, at_most.load()), offset);
  }
  int ftruncate(int file, off_t size) override {
    ++truncations;
    return SpillCalls::ftruncate(file, size);
  }

  // While closed, writes wait.
  void set_open(bool open) {
    const std::lock_guard lock(mutex_);
    open_ = open;
    opened_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = true;
};

class SpillFileTest : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(live_blocks, 0) << "memory that nobody uses was kept"; }

  // Waits for an event of the file's thread, which comes.
  template <class F>
  static void await(F&& happened) {
    while (!happened()) {
      std::this_thread::yield();
    }
  }
  // All that was stored before has been written, or has failed.
  void await_writes(const SpillFile& file, int64_t pieces) {
    await([&] { return file.report().bytes_out + file.report().bytes_kept >= pieces * kBytes; });
  }

  TemporaryFolder folder;
  Faults faults;
};

TEST(SpillExtents, ThePlaceThatIsFreeFirstIsTakenFirst) {
  constexpr int64_t kUnit = SpillExtents::kAlignment;
  SpillExtents extents(kUnlimited);
  EXPECT_EQ(extents.take(1), 0);
  EXPECT_EQ(extents.take(kUnit + 1), kUnit) << "rounded up to the alignment";
  EXPECT_EQ(extents.take(kUnit), 3 * kUnit);
  EXPECT_EQ(extents.end(), 4 * kUnit);
  extents.give_back(0, 1);
  extents.give_back(kUnit, kUnit + 1);
  EXPECT_EQ(extents.take(4 * kUnit), 4 * kUnit) << "two holes side by side are one of three units, too small";
  EXPECT_EQ(extents.take(3 * kUnit), 0) << "and fits three";
  extents.give_back(4 * kUnit, 4 * kUnit);
  EXPECT_EQ(extents.end(), 4 * kUnit) << "free room at the end is not in use";
  extents.give_back(0, 3 * kUnit);
  extents.give_back(3 * kUnit, kUnit);
  EXPECT_EQ(extents.end(), 0);
}

TEST(SpillExtents, PlacesNeverOverlapAndNothingIsLost) {
  SpillExtents extents(kUnlimited);
  struct Place {
    int64_t offset, bytes;
  };
  std::vector<Place> places;
  uint32_t random = 1;
  for (int i = 0; i < 2000; ++i) {
    random = random * 1664525 + 1013904223;
    if (places.size() < 30 && (random >> 16) % 2 == 0) {
      const int64_t bytes = 1 + (random >> 8) % 50'000;
      places.push_back({extents.take(bytes).value(), bytes});
      const Place& mine = places.back();
      for (size_t k = 0; k + 1 < places.size(); ++k) {
        ASSERT_TRUE(mine.offset + mine.bytes <= places[k].offset || places[k].offset + places[k].bytes <= mine.offset);
      }
      ASSERT_LE(mine.offset + mine.bytes, extents.end());
    } else if (!places.empty()) {
      std::swap(places[(random >> 16) % places.size()], places.back());
      extents.give_back(places.back().offset, places.back().bytes);
      places.pop_back();
    }
  }
  for (const Place& place : places) {
    extents.give_back(place.offset, place.bytes);
  }
  EXPECT_EQ(extents.end(), 0);
}

TEST(SpillExtents, NothingLiesPastTheCap) {
  SpillExtents extents(3 * SpillExtents::kAlignment);
  EXPECT_EQ(extents.take(2 * SpillExtents::kAlignment), 0);
  EXPECT_EQ(extents.take(2 * SpillExtents::kAlignment), std::nullopt);
  EXPECT_EQ(extents.take(SpillExtents::kAlignment), 2 * SpillExtents::kAlignment);
}

TEST_F(SpillFileTest, GivesTheBytesBackAsOftenAsTheyAreAskedFor) {
  SpillFile file(folder.path(), kUnlimited, &allocate);
  std::vector<std::unique_ptr<SpillFile::Piece>> pieces;
  for (char i = 0; i < 10; ++i) {
    pieces.push_back(file.store(filled(i, kBytes + i)));
  }
  for (int pass = 0; pass < 2; ++pass) {
    for (char i = 9; i >= 0; --i) {
      EXPECT_TRUE(holds(i, pieces[static_cast<size_t>(i)]->load(), kBytes + i));
    }
  }
}

TEST_F(SpillFileTest, MemoryIsFreeOnceItIsWritten) {
  SpillFile file(folder.path(), kUnlimited, &allocate);
  const auto piece = file.store(filled(1));
  await_writes(file, 1);
  EXPECT_EQ(live_blocks, 0);
  EXPECT_EQ(file.report().bytes_out, kBytes);
  EXPECT_TRUE(holds(1, piece->load()));
  EXPECT_EQ(file.report().bytes_back, kBytes);
}

TEST_F(SpillFileTest, APieceIsFinishedWhenItsMemoryIsFreeOrCannotBe) {
  SpillFile file(folder.path(), kUnlimited, &allocate, faults);
  for (char i = 0; i < 20; ++i) {
    file.store(filled(i))->finish();
    ASSERT_EQ(live_blocks, 0);
  }
  faults.write_error = ENOSPC;
  const auto piece = file.store(filled(1));
  piece->finish();
  EXPECT_EQ(file.report().failed_writes, 1);
  EXPECT_TRUE(holds(1, piece->load()));
}

TEST_F(SpillFileTest, TheFileHasNoName) {
  const SpillFile file(folder.path(), kUnlimited, &allocate);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST_F(SpillFileTest, AFolderThatIsNotThereIsAnErrorThatNamesIt) {
  try {
    const SpillFile file(folder / "absent", kUnlimited, &allocate);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("absent"), HasSubstr("No such file or directory")));
  }
}

TEST_F(SpillFileTest, ASlowDiskMakesTheCallerWaitAndNotMemoryGrow) {
  SpillFile file(folder.path(), kUnlimited, &allocate, faults);
  faults.set_open(false);
  std::atomic<int> stored{0};
  std::vector<std::unique_ptr<SpillFile::Piece>> pieces;
  std::thread forward([&] {
    for (char i = 0; i < 10; ++i) {
      pieces.push_back(file.store(filled(i)));
      ++stored;
    }
  });
  await([&] { return live_blocks == SpillFile::kInFlight + 1; });  // one more: what it waits with
  EXPECT_EQ(stored, SpillFile::kInFlight);
  EXPECT_EQ(file.report().bytes_out, 0);
  faults.set_open(true);
  forward.join();
  for (char i = 0; i < 10; ++i) {
    EXPECT_TRUE(holds(i, pieces[static_cast<size_t>(i)]->load()));
  }
}

// So that the caller may write to what load() gives, whenever it asks.
TEST_F(SpillFileTest, WhatIsNotWrittenYetIsCopied) {
  SpillFile file(folder.path(), kUnlimited, &allocate, faults);
  faults.set_open(false);
  const auto writing = file.store(filled(1));
  const auto waiting = file.store(filled(2));
  for (const bool open : {false, true}) {
    faults.set_open(open);
    const SpillMemory first = writing->load(), second = waiting->load();
    EXPECT_TRUE(holds(1, first));
    EXPECT_TRUE(holds(2, second));
    std::memset(first.data, 3, kBytes);
    std::memset(second.data, 4, kBytes);
  }
  await_writes(file, 2);
  EXPECT_TRUE(holds(1, writing->load()));
  EXPECT_TRUE(holds(2, waiting->load()));
}

TEST_F(SpillFileTest, WhatIsDroppedBeforeItIsWrittenIsNotWritten) {
  SpillFile file(folder.path(), kUnlimited, &allocate, faults);
  faults.set_open(false);
  auto writing = file.store(filled(1));
  auto waiting = file.store(filled(2));
  await([&] { return faults.asked_to_write == 1; });
  waiting.reset();
  faults.set_open(true);
  writing.reset();
  const auto next = file.store(filled(3));
  await_writes(file, 2);
  EXPECT_EQ(file.report().bytes_out, 2 * kBytes);
  EXPECT_TRUE(holds(3, next->load()));
}

TEST_F(SpillFileTest, CallsThatMoveLittleOrAreInterruptedAreRepeated) {
  faults.at_most = 7'001;
  SpillFile file(folder.path(), kUnlimited, &allocate, faults);
  const auto piece = file.store(filled(5));
  await_writes(file, 1);
  EXPECT_TRUE(holds(5, piece->load()));
  EXPECT_GT(faults.writes, kBytes / 7'001);
  EXPECT_GT(faults.reads, kBytes / 7'001);
}

TEST_F(SpillFileTest, AFullDiskLeavesThePieceInMemoryAndIsReported) {
  SpillFile file(folder.path(), kUnlimited, &allocate, faults);
  faults.write_error = ENOSPC;
  {
    const auto piece = file.store(filled(1));
    await_writes(file, 1);
    const SaveOnHost::Report report = file.report();
    EXPECT_EQ(report.failed_writes, 1);
    EXPECT_EQ(report.bytes_kept, kBytes);
    EXPECT_EQ(report.bytes_out, 0);
    EXPECT_THAT(report.failure, AllOf(HasSubstr(folder.path().string()), HasSubstr("No space left on device")));
    std::memset(piece->load().data, 2, kBytes);
    EXPECT_TRUE(holds(1, piece->load()));
    EXPECT_EQ(file.bytes_in_use(), 0) << "its place is free again";
    faults.write_error = 0;
    const auto next = file.store(filled(2));
    await_writes(file, 2);
    EXPECT_TRUE(holds(2, next->load()));
    EXPECT_TRUE(holds(1, piece->load()));
  }
  EXPECT_EQ(file.bytes_in_use(), 0);
}

TEST_F(SpillFileTest, AReadThatFailsIsAnErrorThatNamesFileAndReasonAndMayBeRepeated) {
  SpillFile file(folder.path(), kUnlimited, &allocate, faults);
  const auto piece = file.store(filled(1));
  await_writes(file, 1);
  for (const bool ahead : {false, true}) {
    faults.read_error = EIO;
    if (ahead) {
      piece->prefetch();
      await([&] { return live_blocks == 0; });  // the attempt is over
    }
    try {
      piece->load();
      FAIL() << "no error";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr(folder.path().string()), HasSubstr("Input/output error (errno 5)")));
    }
    faults.read_error = 0;
    EXPECT_TRUE(holds(1, piece->load()));
  }
}

// As when the system has accepted the bytes and the disk fails later.
TEST_F(SpillFileTest, BytesThatTheDiskHasLostAreAnErrorAndNotAResult) {
  SpillFile file(folder.path(), kUnlimited, &allocate, faults);
  const auto good = file.store(filled(1));
  await_writes(file, 1);
  faults.lose_bytes = true;
  auto hole = file.store(filled(2));
  await_writes(file, 2);
  faults.lose_bytes = false;
  const auto behind = file.store(filled(3));  // so that the lost bytes are zeros in the file, not its end
  await_writes(file, 3);
  EXPECT_TRUE(holds(1, good->load()));
  hole->prefetch();
  try {
    hole->load();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("the bytes are not those that were stored"));
  }
  EXPECT_TRUE(holds(3, behind->load()));
}

TEST_F(SpillFileTest, AFileThatIsTooShortIsAnError) {
  SpillFile file(folder.path(), kUnlimited, &allocate, faults);
  faults.lose_bytes = true;
  const auto piece = file.store(filled(1));
  await_writes(file, 1);
  try {
    piece->load();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("the file is shorter"));
  }
}

TEST_F(SpillFileTest, WhatIsReadAheadIsThereAndReadOnce) {
  SpillFile file(folder.path(), kUnlimited, &allocate, faults);
  const auto piece = file.store(filled(1));
  await_writes(file, 1);
  EXPECT_EQ(live_blocks, 0);
  piece->prefetch();
  piece->prefetch();
  await([&] { return file.report().bytes_back == kBytes; });
  EXPECT_EQ(live_blocks, 1);
  const int reads = faults.reads;
  EXPECT_TRUE(holds(1, piece->load()));
  EXPECT_EQ(faults.reads, reads);
  piece->prefetch();
  piece->drop_prefetch();
  EXPECT_EQ(live_blocks, 0);
  EXPECT_TRUE(holds(1, piece->load())) << "it can be read again";
}

TEST_F(SpillFileTest, WithoutMemoryForItNothingIsReadAhead) {
  bool full = false;
  SpillFile file(folder.path(), kUnlimited,
                 [&](int64_t bytes) { return full ? throw std::runtime_error("out of memory") : allocate(bytes); });
  const auto piece = file.store(filled(1));
  await_writes(file, 1);
  full = true;
  EXPECT_NO_THROW(piece->prefetch());
  EXPECT_THROW(piece->load(), std::runtime_error);
  full = false;
  EXPECT_TRUE(holds(1, piece->load()));
}

TEST_F(SpillFileTest, ThePlaceOfWhatIsGoneIsUsedAgainAndTheFileIsCutWhenNothingIsLeft) {
  SpillFile file(folder.path(), kUnlimited, &allocate, faults);
  int64_t most = 0;
  for (int step = 1; step <= 20; ++step) {
    std::vector<std::unique_ptr<SpillFile::Piece>> pieces;
    for (char i = 0; i < 5; ++i) {
      pieces.push_back(file.store(filled(i)));
    }
    most = std::max(most, file.bytes_in_use());
    EXPECT_TRUE(holds(4, pieces[4]->load()));
    pieces.clear();
    EXPECT_EQ(file.bytes_in_use(), 0);
    await([&] { return faults.truncations >= step; });
  }
  EXPECT_LE(most, 6 * kBytes);
}

TEST_F(SpillFileTest, PastTheCapNothingIsTakenUntilThereIsRoomAgain) {
  SpillFile file(folder.path(), 5 * kBytes / 2, &allocate);
  auto first = file.store(filled(1));
  const auto second = file.store(filled(2));
  EXPECT_EQ(file.store(filled(3)), nullptr);
  EXPECT_EQ(file.report().bytes_kept, kBytes);
  first.reset();
  const auto third = file.store(filled(3));
  ASSERT_NE(third, nullptr);
  EXPECT_TRUE(holds(2, second->load()));
  EXPECT_TRUE(holds(3, third->load()));
}

// For the thread sanitizer above all.
TEST_F(SpillFileTest, ManyThreadsReadReadAheadAndDropAtOnce) {
  SpillFile file(folder.path(), kUnlimited, &allocate, faults);
  std::vector<std::thread> threads;
  for (char t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 30; ++round) {
        const auto a = file.store(filled(t));
        const auto b = file.store(filled(static_cast<char>(t + 10)));
        if (round % 3 == 0) {
          continue;  // dropped without being read
        }
        a->prefetch();
        b->prefetch();
        std::thread other([&] { EXPECT_TRUE(holds(t, a->load())); });
        EXPECT_TRUE(holds(t, a->load()));
        b->drop_prefetch();
        EXPECT_TRUE(holds(static_cast<char>(t + 10), b->load()));
        other.join();
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(file.bytes_in_use(), 0);
}

}  // namespace
}  // namespace snug::detail::spill_file_test
