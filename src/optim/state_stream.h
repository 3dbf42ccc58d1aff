#pragma once
// StateStream: an update whose state lies in a file, block by block. While a block is computed, a thread writes the one
// before and reads the next two; so three blocks are in memory at a time.
//
//   StateStream stream(disk, blocks);
//   stream.wait_for_first();  // nothing has been changed yet
//   stream.run();

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "src/core/spill_disk.h"

namespace snug::detail {

/// Memory, and the place in the file that it is read from and written to.
struct StatePart {
  void* memory = nullptr;
  int64_t bytes = 0;
  int64_t offset = 0;
  std::optional<uint64_t>* sum = nullptr;  ///< of what was written there; none yet: zeros are read
};

struct StateBlock {
  std::vector<StatePart> parts = {};
  std::function<void()> update = {};  ///< reads and writes the memory of its parts; must not throw
};

class StateStream final {
 public:
  /// Block i and block i + kInMemory may share memory.
  static constexpr size_t kInMemory = 3;

  /// Begins to read. `disk` must outlive it. Throws std::system_error if there can be no thread.
  StateStream(SpillDisk& disk, std::vector<StateBlock> blocks);
  ~StateStream();
  StateStream(const StateStream&) = delete;
  StateStream& operator=(const StateStream&) = delete;

  /// Throws Error if the first block cannot be read, or if a later one is known to be unreadable; then nothing has been
  /// updated, and run() must not be called.
  void wait_for_first();
  /// Updates all blocks and returns when they are written. Throws Error if one can be neither read nor written; those
  /// before it have been updated: after wait_for_first(), at least the first.
  void run();

 private:
  struct Transfer {
    size_t block;
    bool is_write;
  };

  void work();
  std::string transfer(const Transfer& one);
  void enqueue(Transfer one);
  // Throws Error if one of them has failed, or cannot be made because an earlier one has.
  void wait_for(size_t transfers);

  SpillDisk& disk_;
  std::vector<StateBlock> blocks_;
  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  std::vector<Transfer> transfers_;  // in the order in which they are made
  size_t done_ = 0;                  // without a failure
  bool is_stopping_ = false;
  std::string failure_;
  std::thread thread_;
};

}  // namespace snug::detail
