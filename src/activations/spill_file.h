#pragma once
// SpillFile: memory that waits in a file until it is needed again. Writes and reads ahead happen on a thread of its
// own.
//
//   SpillFile file("/scratch", /*cap=*/1 << 30, allocate);
//   auto piece = file.store(std::move(memory));   // the memory is dropped once it is written
//   SpillMemory again = piece->load();            // any number of times; the piece's destructor frees its place

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

/// All methods may be called from any thread, and so may those of its pieces.
class SpillFile final {
  struct State;

 public:
  using Allocate = std::function<SpillMemory(int64_t bytes)>;

  /// The most pieces that hold their memory because their write is not complete.
  static constexpr int kInFlight = 2;

  /// The result of store(). It must not outlive the file. Its destructor waits for a running transfer of this piece.
  class Piece final {
   public:
    Piece(SpillFile& file, std::shared_ptr<State> state);
    ~Piece();
    Piece(const Piece&) = delete;
    Piece& operator=(const Piece&) = delete;

    /// A copy in memory from `allocate`, a new one each time: the caller may write to it. Throws Error, naming path and
    /// reason, if the piece cannot be read, and whatever `allocate` throws.
    SpillMemory load();
    /// Begins to read, if the piece is not in memory, so that load() finds it there. Does nothing if there is no memory
    /// for it.
    void prefetch();
    /// Drops the bytes that were read ahead.
    void drop_prefetch();
    /// Waits until the memory is written and dropped, and returns true. Returns false if it could not be written; the
    /// memory then stays.
    bool finish();

   private:
    SpillFile& file_;
    std::shared_ptr<State> state_;
  };

  /// A file without a name in `directory` (empty: the system's temporary one), never longer than `cap`. Throws Error if
  /// it cannot be made.
  SpillFile(const std::filesystem::path& directory, int64_t cap, Allocate allocate,
            SpillCalls& calls = SpillCalls::real());
  ~SpillFile();
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  /// Takes memory to write; waits while kInFlight pieces are unwritten. nullptr if there is no room below the cap. If
  /// the write fails, the piece keeps its memory.
  std::unique_ptr<Piece> store(SpillMemory memory);

  OffloadReport report() const;
  /// The length of the used part of the file in bytes, holes included.
  int64_t bytes_in_use() const;

 private:
  void work();
  void write_out(std::unique_lock<std::mutex>& lock);
  void read_ahead(std::unique_lock<std::mutex>& lock);
  void shorten(std::unique_lock<std::mutex>& lock);

  Allocate allocate_;
  SpillDisk disk_;

  mutable std::mutex mutex_;  // guards what follows, and every State
  std::condition_variable work_;
  std::condition_variable done_;
  std::deque<std::shared_ptr<State>> writes_;
  std::deque<std::shared_ptr<State>> reads_;
  SpillExtents extents_;
  int in_flight_ = 0;
  bool longer_than_needed_ = false;
  bool stopping_ = false;
  OffloadReport report_;

  std::thread thread_;
};

}  // namespace snug::detail
