#include "src/optim/state_stream.h"

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "snug/core.h"
#include "tests/support/temporary_folder.h"

// No torch here, so that the sanitizers can say something of the thread.

namespace snug::detail::state_stream_test {
namespace {

using snug::testing::TemporaryFolder;
using ::testing::HasSubstr;

constexpr int64_t kNumbers = 10'000;
constexpr auto kBytes = static_cast<int64_t>(kNumbers * sizeof(int32_t));

class Faults final : public SpillCalls {
 public:
  std::atomic<int> calls{0}, fail_at{0};

  ssize_t pwrite(int file, const void* data, size_t size, off_t offset) override {
    return fails() ? -1 : SpillCalls::pwrite(file, data, size, offset);
  }
  ssize_t pread(int file, void* data, size_t size, off_t offset) override {
    return fails() ? -1 : SpillCalls::pread(file, data, size, offset);
  }

 private:
  bool fails() {
    errno = EIO;
    return ++calls == fail_at;
  }
};

// As many numbers in each of some blocks; a round adds the number of its block to each.
struct Numbers {
  explicit Numbers(size_t count) : blocks(count), disk(folder.path(), faults), sums(count) {}

  std::vector<StateBlock> round() {
    std::vector<StateBlock> all;
    for (size_t i = 0; i < blocks; ++i) {
      std::vector<int32_t>& memory = window[i % StateStream::kInMemory];
      const auto offset = static_cast<int64_t>(i) * kBytes;
      all.push_back({.parts = {{memory.data(), kBytes / 2, offset, &sums[i][0]},
                               {memory.data() + kNumbers / 2, kBytes / 2, offset + kBytes / 2, &sums[i][1]}},
                     .update = [this, &memory, i] {
                       ++updates;
                       for (int32_t& number : memory) {
                         number += static_cast<int32_t>(i);
                       }
                     }});
    }
    return all;
  }
  // What is in the file is that of so many rounds.
  void expect_rounds(int32_t rounds) {
    std::vector<int32_t> found(kNumbers);
    for (size_t i = 0; i < blocks; ++i) {
      for (size_t half = 0; half < 2; ++half) {
        ASSERT_EQ(disk.read(found.data() + half * kNumbers / 2, kBytes / 2,
                            static_cast<int64_t>(i) * kBytes + static_cast<int64_t>(half) * kBytes / 2, *sums[i][half]),
                  "");
      }
      ASSERT_EQ(found, std::vector<int32_t>(kNumbers, rounds * static_cast<int32_t>(i))) << "block " << i;
    }
  }

  struct Halves {
    std::optional<uint64_t> sums[2];
    std::optional<uint64_t>& operator[](size_t i) { return sums[i]; }
  };
  size_t blocks;
  size_t updates = 0;
  TemporaryFolder folder;
  Faults faults;
  SpillDisk disk;
  std::vector<Halves> sums;
  std::vector<int32_t> window[StateStream::kInMemory] = {std::vector<int32_t>(kNumbers), std::vector<int32_t>(kNumbers),
                                                         std::vector<int32_t>(kNumbers)};
};

TEST(StateStream, UpdatesEveryBlockOfAnyNumberAndBeginsWithZeros) {
  for (const size_t blocks : {0, 1, 2, 3, 4, 17}) {
    Numbers numbers(blocks);
    for (int round = 1; round <= 3; ++round) {
      StateStream stream(numbers.disk, numbers.round());
      stream.wait_for_first();
      stream.run();
      numbers.expect_rounds(round);
    }
  }
}

TEST(StateStream, TellsOfEachTransferThatFailsAndOfWhetherAnythingWasUpdated) {
  constexpr int kBlocks = 7, kCalls = 2 * 2 * kBlocks;  // two parts, read and written
  int before = 0;
  for (int call = 1; call <= kCalls; ++call) {
    Numbers numbers(kBlocks);
    StateStream(numbers.disk, numbers.round()).run();
    numbers.faults.calls = 0;
    numbers.faults.fail_at = call;
    StateStream stream(numbers.disk, numbers.round());
    bool is_known_before = true;
    try {
      stream.wait_for_first();
      is_known_before = false;
      stream.run();
      ADD_FAILURE() << "call " << call << " was not made";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("spill file"));
      EXPECT_EQ(is_known_before, numbers.updates == kBlocks) << "call " << call;
      before += is_known_before ? 1 : 0;
    }
  }
  EXPECT_GE(before, 2) << "the reads of the first block";
  EXPECT_LE(before, 4) << "and the second one's, where they fail at once";
}

TEST(StateStream, CanBeLetGoBeforeItRuns) {
  Numbers numbers(5);
  StateStream(numbers.disk, numbers.round()).run();
  {
    StateStream stream(numbers.disk, numbers.round());
  }
  numbers.expect_rounds(1);
}

}  // namespace
}  // namespace snug::detail::state_stream_test
