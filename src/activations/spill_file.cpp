// How pieces of memory move to a file and back (the file of offload_store.cpp)
//
// Problem: forward and backward should not wait for the disk, but memory that waits for its write is still in use.
// Options: transfers on the caller's thread, or on a thread of the file.
// Choice: a thread of the file makes all writes and the reads ahead. At most kInFlight pieces are unwritten; then
// store() waits. Reads come first, because a caller is about to wait. load() itself reads a piece that was not read
// ahead.
// Consequences: a transfer runs without the lock, so the thread owns a State from Writing or Reading to the next state,
// and other threads wait for done_. Memory is always released without the lock.

#include "src/activations/spill_file.h"

#include <cstring>
#include <exception>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "snug/core.h"

namespace snug::detail {
// The state of a piece, and the bytes that were read ahead. The file's thread owns the state between Writing and the
// next state, and between Reading and the next state.
struct SpillFile::State {
  enum class Place { Queued, Writing, InFile, InMemory };
  enum class Ahead { None, Queued, Reading, There };

  int64_t bytes = 0;
  int64_t offset = 0;
  Place place = Place::Queued;
  SpillMemory memory = {};  // unless InFile
  uint64_t sum = 0;         // once memory is gone
  Ahead ahead = Ahead::None;
  SpillMemory copy = {};  // unless None

  bool is_moving() const { return place == Place::Writing || ahead == Ahead::Reading; }
};

SpillFile::SpillFile(const std::filesystem::path& directory, int64_t cap, Allocate allocate, SpillCalls& calls)
    : allocate_(std::move(allocate)), disk_(directory, calls), extents_(cap), thread_([this] { work(); }) {}

SpillFile::~SpillFile() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_one();
  thread_.join();
}

std::unique_ptr<SpillFile::Piece> SpillFile::store(SpillMemory memory) {
  auto state = std::make_shared<State>();
  {
    std::unique_lock lock(mutex_);
    const auto offset = extents_.take(memory.bytes);
    if (!offset) {
      report_.bytes_kept += memory.bytes;
      return nullptr;
    }
    state->bytes = memory.bytes;
    state->offset = *offset;
    state->memory = std::move(memory);
    done_.wait(lock, [&] { return in_flight_ < kInFlight; });
    ++in_flight_;
    writes_.push_back(state);
  }
  work_.notify_one();
  return std::make_unique<Piece>(*this, std::move(state));
}

SaveOnHost::Report SpillFile::report() const {
  const std::lock_guard lock(mutex_);
  return report_;
}

int64_t SpillFile::bytes_in_use() const {
  const std::lock_guard lock(mutex_);
  return extents_.end();
}

// Reads come first: a caller is about to wait for a read.
void SpillFile::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return stopping_ || !reads_.empty() || !writes_.empty() || longer_than_needed_; });
    if (!reads_.empty()) {
      read_ahead(lock);
    } else if (!writes_.empty()) {
      write_out(lock);
    } else if (stopping_) {
      return;
    } else {
      shorten(lock);
    }
  }
}

void SpillFile::write_out(std::unique_lock<std::mutex>& lock) {
  auto state = std::move(writes_.front());
  writes_.pop_front();
  state->place = State::Place::Writing;
  lock.unlock();
  uint64_t sum = 0;
  const std::string failure = disk_.write(state->memory.data, state->bytes, state->offset, sum);
  lock.lock();
  if (failure.empty()) {
    SpillMemory written = std::exchange(state->memory, {});
    state->sum = sum;  // from now on load() reads the file
    lock.unlock();
    written = {};  // released before another piece may come (at most kInFlight), and before the state says InFile
    lock.lock();
    state->place = State::Place::InFile;
    report_.bytes_out += state->bytes;
  } else {
    state->place = State::Place::InMemory;
    extents_.give_back(state->offset, state->bytes);
    report_.bytes_kept += state->bytes;
    ++report_.failed_writes;
    report_.failure = failure;
  }
  --in_flight_;
  done_.notify_all();
}

void SpillFile::read_ahead(std::unique_lock<std::mutex>& lock) {
  auto state = std::move(reads_.front());
  reads_.pop_front();
  state->ahead = State::Ahead::Reading;
  lock.unlock();
  const std::string failure = disk_.read(state->copy.data, state->bytes, state->offset, state->sum);
  lock.lock();
  SpillMemory useless;
  if (failure.empty()) {
    state->ahead = State::Ahead::There;
    report_.bytes_back += state->bytes;
  } else {  // load() will read the piece itself, and report the failure
    state->ahead = State::Ahead::None;
    useless = std::exchange(state->copy, {});
  }
  done_.notify_all();
  lock.unlock();
  useless = {};
  lock.lock();
}

// Cuts the unused end of the file off, so the disk need not write the end. Only this thread writes, so no pending write
// is lost.
void SpillFile::shorten(std::unique_lock<std::mutex>& lock) {
  longer_than_needed_ = false;
  const int64_t size = extents_.end();
  lock.unlock();
  disk_.shorten(size);
  lock.lock();
}

SpillFile::Piece::Piece(SpillFile& file, std::shared_ptr<State> state) : file_(file), state_(std::move(state)) {}

SpillFile::Piece::~Piece() {
  SpillMemory memory, copy;  // dropped without the lock
  {
    std::unique_lock lock(file_.mutex_);
    file_.done_.wait(lock, [&] { return !state_->is_moving(); });
    std::erase(file_.reads_, state_);
    file_.in_flight_ -= static_cast<int>(std::erase(file_.writes_, state_));
    if (state_->place != State::Place::InMemory) {
      file_.extents_.give_back(state_->offset, state_->bytes);
      file_.longer_than_needed_ = file_.longer_than_needed_ || file_.extents_.end() == 0;
    }
    memory = std::exchange(state_->memory, {});
    copy = std::exchange(state_->copy, {});
  }
  file_.done_.notify_all();
  file_.work_.notify_one();
}

SpillMemory SpillFile::Piece::load() {
  SpillMemory unwritten, copy;
  {
    std::unique_lock lock(file_.mutex_);
    file_.done_.wait(lock, [&] { return state_->ahead != State::Ahead::Reading; });
    unwritten = state_->memory;
    std::erase(file_.reads_, state_);
    copy = std::exchange(state_->copy, {});
    if (std::exchange(state_->ahead, State::Ahead::None) == State::Ahead::There) {
      return copy;
    }
  }
  if (copy.data == nullptr) {
    copy = file_.allocate_(state_->bytes);
  }
  if (unwritten.data != nullptr) {
    std::memcpy(copy.data, unwritten.data, static_cast<size_t>(state_->bytes));
    return copy;
  }
  const std::string failure = file_.disk_.read(copy.data, state_->bytes, state_->offset, state_->sum);
  if (!failure.empty()) {
    throw Error(fmt::format("offload: {}; give a directory on another disk", failure));
  }
  const std::lock_guard lock(file_.mutex_);
  file_.report_.bytes_back += state_->bytes;
  return copy;
}

void SpillFile::Piece::prefetch() {
  const auto is_wanted = [&] { return state_->place == State::Place::InFile && state_->ahead == State::Ahead::None; };
  {
    const std::lock_guard lock(file_.mutex_);
    if (!is_wanted()) {
      return;
    }
  }
  SpillMemory copy;
  try {
    copy = file_.allocate_(state_->bytes);
  } catch (const std::exception&) {
    return;
  }
  const std::lock_guard lock(file_.mutex_);
  if (is_wanted()) {
    state_->copy = std::exchange(copy, {});
    state_->ahead = State::Ahead::Queued;
    file_.reads_.push_back(state_);
    file_.work_.notify_one();
  }
}

bool SpillFile::Piece::finish() {
  std::unique_lock lock(file_.mutex_);
  file_.done_.wait(lock,
                   [&] { return state_->place == State::Place::InFile || state_->place == State::Place::InMemory; });
  return state_->place == State::Place::InFile;
}

void SpillFile::Piece::drop_prefetch() {
  SpillMemory copy;
  std::unique_lock lock(file_.mutex_);
  file_.done_.wait(lock, [&] { return state_->ahead != State::Ahead::Reading; });
  std::erase(file_.reads_, state_);
  state_->ahead = State::Ahead::None;
  copy = std::exchange(state_->copy, {});
  lock.unlock();
}

}  // namespace snug::detail
