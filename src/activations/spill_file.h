#pragma once
// SpillFile: memory that waits in a file until the program needs the memory again. Writes and reads ahead happen on a
// thread of the file.
//
//   SpillFile file("/scratch", /*cap=*/1 << 30, allocate);
//   auto piece = file.store(std::move(memory));   // the memory is dropped once it is written
//   SpillMemory again = piece->load();            // any number of times; the piece's destructor frees its bytes

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "snug/offload.h"
#include "src/activations/spill_extents.h"
#include "src/core/spill_disk.h"

namespace snug::detail {

/// Bytes that live as long as `owner`.
struct SpillMemory {
  std::shared_ptr<void> owner = {};
  void* data = nullptr;
  int64_t bytes = 0;
};

/// All methods of the file and of its pieces may be called from any thread.
class SpillFile final {
  struct State;

 public:
  using Allocate = std::function<SpillMemory(int64_t bytes)>;

  /// The most pieces that keep their memory because their write is not complete.
  static constexpr int kInFlight = 2;

  /// The result of store(). A piece must not outlive the file. The destructor waits for a running transfer of the
  /// piece.
  class Piece final {
   public:
    Piece(SpillFile& file, std::shared_ptr<State> state);
    ~Piece();
    Piece(const Piece&) = delete;
    Piece& operator=(const Piece&) = delete;

    /// Returns a new copy each time, in memory from `allocate`: the caller may write to the copy. Throws Error, naming
    /// path and reason, if the piece cannot be read, and any exception of `allocate`.
    SpillMemory load();
    /// Begins to read, if the piece is not in memory, so that load() finds the bytes in memory. Does nothing if
    /// `allocate` has no memory for the bytes.
    void prefetch();
    /// Drops the bytes that were read ahead.
    void drop_prefetch();
    /// Waits until the memory is written and dropped, and returns true. Returns false if the memory could not be
    /// written; the memory then stays.
    bool finish();

   private:
    SpillFile& file_;
    std::shared_ptr<State> state_;
  };

  /// Makes a file without a name in `directory` (empty: the system's temporary directory), never longer than `cap`.
  /// Throws Error if the file cannot be made.
  SpillFile(const std::filesystem::path& directory, int64_t cap, Allocate allocate,
            SpillCalls& calls = SpillCalls::real());
  ~SpillFile();
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  /// Takes memory to write; waits while kInFlight pieces are unwritten. Returns nullptr if the file has no room below
  /// the cap. If the write fails, the piece keeps its memory.
  std::unique_ptr<Piece> store(SpillMemory memory);

  SaveOnHost::Report report() const;
  /// The length of the used part of the file in bytes, holes included.
  int64_t bytes_in_use() const;

 private:
  void work();
  void write_out(std::unique_lock<std::mutex>& lock);
  void read_ahead(std::unique_lock<std::mutex>& lock);
  void shorten(std::unique_lock<std::mutex>& lock);

  Allocate allocate_;
  SpillDisk disk_;

  mutable std::mutex mutex_;  // guards the following members, and every State
  std::condition_variable work_;
  std::condition_variable done_;
  std::deque<std::shared_ptr<State>> writes_;
  std::deque<std::shared_ptr<State>> reads_;
  SpillExtents extents_;
  int in_flight_ = 0;
  bool longer_than_needed_ = false;
  bool stopping_ = false;
  SaveOnHost::Report report_;

  std::thread thread_;
};

}  // namespace snug::detail
