#pragma once
// StateStream: an update whose state lies in a file, block by block. While a block is computed, a thread writes the
// block before and reads the next two blocks. So three blocks are in memory at a time.
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

/// Memory, and the part of the file that the memory is read from and written to.
struct StatePart {
  void* memory = nullptr;
  int64_t bytes = 0;
  int64_t offset = 0;
  std::optional<uint64_t>* sum = nullptr;  ///< checksum of the written bytes; nothing written yet: zeros are read
};

struct StateBlock {
  std::vector<StatePart> parts = {};
  std::function<void()> update = {};  ///< reads and writes the memory of `parts`
};

class StateStream final {
 public:
  /// Block i and block i + kInMemory may share memory.
  static constexpr size_t kInMemory = 3;

  /// Begins to read. `disk` must outlive the stream. Throws std::system_error if the thread cannot be started.
  StateStream(SpillDisk& disk, std::vector<StateBlock> blocks);
  ~StateStream();
  StateStream(const StateStream&) = delete;
  StateStream& operator=(const StateStream&) = delete;

  /// Throws Error if the first block cannot be read, or if a later block is already found to be unreadable; then
  /// nothing has been updated, and run() must not be called.
  void wait_for_first();
  /// Updates all blocks and returns when all blocks are written. Throws Error if a block cannot be read or written.
  /// Then the blocks before have been updated: after wait_for_first(), at least the first block. Throws also as an
  /// update does.
  void run();

 private:
  struct Transfer {
    size_t block;
    bool is_write;
  };

  void work();
  std::string transfer(const Transfer& one);
  void enqueue(Transfer one);
  // Throws Error if a transfer has failed, or cannot be made because an earlier transfer has failed.
  void wait_for(size_t transfers);

  SpillDisk& disk_;
  std::vector<StateBlock> blocks_;
  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  std::vector<Transfer> transfers_;  // in order of execution
  size_t done_ = 0;                  // transfers done without a failure
  bool is_stopping_ = false;
  std::string failure_;
  std::thread thread_;
};

}  // namespace snug::detail
