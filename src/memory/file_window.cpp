#include "src/memory/file_window.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include <ATen/core/Tensor.h>

#include "src/core/file_memory.h"
#include "src/memory/operator_mode.h"

namespace snug::detail {
namespace {

std::mutex mutex_of_windows;
std::vector<FileWindow*> windows;
std::atomic<bool> has_windows = false;

template <class F>
void for_each_window(F&& call) {
  const std::lock_guard lock(mutex_of_windows);
  for (FileWindow* window : windows) {
    call(*window);
  }
}

}  // namespace

int64_t FileWindow::bytes_for(const std::vector<c10::Storage>& storages) {
  size_t largest = 0;
  for (const c10::Storage& storage : storages) {
    largest = std::max(largest, storage.nbytes());
  }
  return static_cast<int64_t>(largest);
}

FileWindow::FileWindow(std::vector<c10::Storage> storages) : bytes_(bytes_for(storages)), counted_(bytes_) {
  for (c10::Storage& storage : storages) {
    numbers_.emplace(storage.unsafeGetStorageImpl(), static_cast<int>(entries_.size()));
    const auto bytes = static_cast<int64_t>(storage.nbytes());
    entries_.push_back({.storage = std::move(storage), .bytes = bytes, .is_in = false, .used = 0, .place = {}});
  }
  let_go();
  const std::lock_guard lock(mutex_of_windows);
  windows.push_back(this);
  has_windows = true;
}

FileWindow::~FileWindow() {
  const std::lock_guard lock(mutex_of_windows);
  std::erase(windows, this);
  has_windows = !windows.empty();
}

// Lets go of all entries: code outside operators may have read pages of entries that are not marked as in.
void FileWindow::let_go() {
  const std::lock_guard lock(mutex_);
  for (Entry& entry : entries_) {
    FileMemory::let_go(entry.storage.data(), entry.bytes);
    entry.is_in = false;
  }
  by_use_.clear();
  in_ = 0;
  if (!came_.empty()) {
    foreseen_ = std::exchange(came_, {});
  }
}

void FileWindow::begin(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const std::lock_guard lock(mutex_);
  ++now_;
  for (const c10::IValue& argument : torch::jit::last(stack, op.schema().arguments().size())) {
    visit_tensors_in(argument, [this](const at::Tensor& tensor) {
      if (tensor.has_storage()) {
        use(tensor.storage().unsafeGetStorageImpl());
      }
    });
  }
  trim();
  if (in_ > bytes_) {
    excess_.emplace(in_ - bytes_);
  }
}

void FileWindow::end() {
  const std::lock_guard lock(mutex_);
  if (excess_) {
    ++now_;
    trim();
    excess_.reset();
  }
}

void FileWindow::use(const c10::StorageImpl* storage) {
  const auto found = numbers_.find(storage);
  if (found == numbers_.end()) {
    return;
  }
  Entry& entry = entries_[static_cast<size_t>(found->second)];
  entry.used = now_;
  if (entry.is_in) {
    by_use_.splice(by_use_.begin(), by_use_, entry.place);
  } else {
    bring(found->second);
  }
}

void FileWindow::bring(int number) {
  Entry& entry = entries_[static_cast<size_t>(number)];
  by_use_.push_front(number);
  entry.place = by_use_.begin();
  entry.is_in = true;
  in_ += entry.bytes;
  const size_t next = came_.size() + 1;
  const bool is_as_foreseen = next < foreseen_.size() && foreseen_[next - 1] == number;
  came_.push_back(number);
  if (is_as_foreseen) {
    const Entry& ahead = entries_[static_cast<size_t>(foreseen_[next])];
    FileMemory::read_ahead(ahead.storage.data(), ahead.bytes);  // into the system's cache
  }
}

// Never takes out the operands of the operator under way.
void FileWindow::trim() {
  while (in_ > bytes_ && !by_use_.empty()) {
    Entry& oldest = entries_[static_cast<size_t>(by_use_.back())];
    if (oldest.used == now_) {
      return;
    }
    by_use_.pop_back();
    oldest.is_in = false;
    in_ -= oldest.bytes;
    FileMemory::let_go(oldest.storage.data(), oldest.bytes);
  }
}

OperandsInFile::OperandsInFile(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (!has_windows.load(std::memory_order_relaxed)) {
    return;
  }
  has_begun_ = true;
  try {
    for_each_window([&](FileWindow& window) { window.begin(op, stack); });
  } catch (...) {
    for_each_window([](FileWindow& window) { window.end(); });
    throw;
  }
}

OperandsInFile::~OperandsInFile() {
  if (has_begun_) {
    for_each_window([](FileWindow& window) { window.end(); });
  }
}

}  // namespace snug::detail
