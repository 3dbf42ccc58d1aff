#include "src/optim/state_stream.h"

#include <algorithm>
#include <utility>

#include "snug/core.h"

// Transfers are made in one order: read 0, read 1, write 0, read 2, write 1, read 3 and so on. Block i + 2 has the
// memory of block i - 1. So block i - 1 has been written before block i + 2 is read into the memory.

namespace snug::detail {
namespace {

constexpr size_t kReadAhead = StateStream::kInMemory - 1;

}  // namespace

StateStream::StateStream(SpillDisk& disk, std::vector<StateBlock> blocks) : disk_(disk), blocks_(std::move(blocks)) {
  transfers_.reserve(2 * blocks_.size());
  for (size_t i = 0; i < std::min(kReadAhead, blocks_.size()); ++i) {
    transfers_.push_back({i, false});
  }
  thread_ = std::thread([this] { work(); });
}

StateStream::~StateStream() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void StateStream::wait_for_first() {
  if (!blocks_.empty()) {
    wait_for(1);
  }
  const std::lock_guard lock(mutex_);
  if (!failure_.empty()) {
    throw Error(failure_);
  }
}

void StateStream::run() {
  for (size_t i = 0; i < blocks_.size(); ++i) {
    wait_for(i == 0 ? 1 : 2 * i);  // the transfers up to the read of block i
    blocks_[i].update();
    enqueue({i, true});
    if (i + kReadAhead < blocks_.size()) {
      enqueue({i + kReadAhead, false});
    }
  }
  wait_for(2 * blocks_.size());
}

void StateStream::enqueue(Transfer one) {
  {
    const std::lock_guard lock(mutex_);
    transfers_.push_back(one);
  }
  changed_.notify_all();
}

void StateStream::wait_for(size_t transfers) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= transfers || !failure_.empty(); });
  if (done_ < transfers) {
    throw Error(failure_);
  }
}

void StateStream::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return is_stopping_ || done_ < transfers_.size(); });
    if (is_stopping_ || !failure_.empty()) {
      return;
    }
    const Transfer next = transfers_[done_];
    lock.unlock();
    std::string failure = transfer(next);
    lock.lock();
    failure_ = std::move(failure);
    done_ += failure_.empty() ? 1 : 0;
    changed_.notify_all();
  }
}

std::string StateStream::transfer(const Transfer& one) {
  std::string failure;
  for (const StatePart& part : blocks_[one.block].parts) {
    if (one.is_write) {
      uint64_t sum = 0;
      failure = disk_.write(part.memory, part.bytes, part.offset, sum);
      *part.sum = sum;
    } else if (*part.sum) {
      failure = disk_.read(part.memory, part.bytes, part.offset, **part.sum);
    } else {
      std::fill_n(static_cast<char*>(part.memory), part.bytes, char{0});  // an empty part has no memory
    }
    if (!failure.empty()) {
      break;
    }
  }
  return failure;
}

}  // namespace snug::detail
