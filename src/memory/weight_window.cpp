#include "src/memory/weight_window.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <utility>

#include <ATen/ATen.h>

#include "src/core/file_memory.h"
#include "src/memory/absent_storage.h"
#include "src/memory/late_writes.h"
#include "src/memory/operator_mode.h"

namespace snug::detail {
namespace {

std::mutex mutex_of_windows;
std::vector<WeightWindow*> windows;
std::atomic<bool> has_windows = false;
thread_local bool is_moving = false;  // a home is at work on this thread

bool is_written_by(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

}  // namespace

// --- homes

void CountedHome::exceed(int64_t bytes) {
  excess_.reset();
  if (bytes > 0) {
    excess_.emplace(bytes);
  }
}

void CountedHome::widen(int64_t bytes) {
  more_.reset();
  if (bytes > 0) {
    more_.emplace(bytes);
  }
}

void FileHome::let_go(size_t number, bool) {
  FileMemory::let_go(storages_[number].data(), static_cast<int64_t>(storages_[number].nbytes()));
}

void FileHome::read_ahead(size_t number) {
  FileMemory::read_ahead(storages_[number].data(), static_cast<int64_t>(storages_[number].nbytes()));
}

// --- the window

int64_t WeightWindow::bytes_for(const std::vector<c10::Storage>& storages, int64_t count, int64_t multiple) {
  int64_t largest = 0, all = 0;
  for (const c10::Storage& storage : storages) {
    const int64_t room = (static_cast<int64_t>(storage.nbytes()) + multiple - 1) / multiple * multiple;
    largest = std::max(largest, room);
    all += room;
  }
  return std::min(count * largest, all);
}

WeightWindow::WeightWindow(std::vector<c10::Storage> storages, WeightHome& home, int64_t bytes)
    : home_(home), bytes_(bytes) {
  for (c10::Storage& storage : storages) {
    numbers_.emplace(storage.unsafeGetStorageImpl(), entries_.size());
    const auto size = static_cast<int64_t>(storage.nbytes());
    entries_.push_back({.storage = std::move(storage), .bytes = size, .place = {}});
  }
  let_go();
  const std::lock_guard lock(mutex_of_windows);
  windows.push_back(this);
  has_windows = true;
}

bool WeightWindow::exists() noexcept { return has_windows.load(std::memory_order_relaxed); }

WeightWindow::~WeightWindow() {
  const std::lock_guard lock(mutex_of_windows);
  std::erase(windows, this);
  has_windows = !windows.empty();
}

void WeightWindow::let_go() {
  const std::lock_guard lock(mutex_);
  const UnseenByWindows unseen;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    home_.let_go(i, entry.is_written);
    entry.is_written = entry.is_beside = false;
    if (std::exchange(entry.is_in, false)) {
      by_use_.erase(entry.place);
      in_ -= entry.bytes;
    }
  }
  at_ = ahead_ = 0;
  if (used_.empty()) {
    return;
  }
  foreseen_ = std::exchange(used_, {});
  for (Entry& entry : entries_) {
    entry.uses.clear();
  }
  for (size_t i = 0; i < foreseen_.size(); ++i) {
    entries_[foreseen_[i]].uses.push_back(i);
  }
}

// Returns the operands that are in the window, for end().
std::vector<size_t> WeightWindow::begin(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  const std::lock_guard lock(mutex_);
  const auto& schema = op.schema().arguments();
  const auto arguments = torch::jit::last(stack, schema.size());
  std::vector<size_t> operands;
  for (size_t i = 0; i < schema.size(); ++i) {
    visit_tensors_in(arguments[i], [&](const at::Tensor& tensor) {
      const auto found = tensor.has_storage() ? numbers_.find(tensor.storage().unsafeGetStorageImpl()) : numbers_.end();
      if (found != numbers_.end()) {
        operands.push_back(found->second);
        Entry& entry = entries_[found->second];
        ++entry.users;
        entry.is_written = entry.is_written || is_written_by(schema[i]);
      }
    });
  }
  if (operands.empty()) {
    return operands;
  }
  const UnseenByWindows unseen;
  try {
    for (const size_t number : operands) {
      bring(number);
    }
    make_room(0);
    tell_excess();
  } catch (...) {
    finish(operands);
    throw;
  }
  return operands;
}

void WeightWindow::end(const std::vector<size_t>& operands) noexcept {
  const std::lock_guard lock(mutex_);
  const UnseenByWindows unseen;
  finish(operands);
}

// A storage that cannot go out stays in, and goes when the next operator needs room. A storage that cannot come ahead
// comes at its use.
void WeightWindow::finish(const std::vector<size_t>& operands) noexcept {
  for (const size_t number : operands) {
    --entries_[number].users;
  }
  try {
    for (const size_t number : operands) {
      if (entries_[number].is_in && entries_[number].is_beside && entries_[number].users == 0) {
        take_out(number);
      }
    }
    make_room(0);
    bring_ahead();
    tell_excess();
  } catch (...) {
  }
}

void WeightWindow::tell_excess() {
  const int64_t excess = std::max<int64_t>(0, in_ - bytes_);
  if (excess != std::exchange(excess_, excess)) {
    home_.exceed(excess);
  }
}

// Later uses than kMost are not foreseen.
void WeightWindow::note_use(size_t number) {
  constexpr size_t kMost = size_t{1} << 20;
  if (used_.size() < kMost) {
    used_.push_back(number);
  }
  at_ = at_ < foreseen_.size() && foreseen_[at_] == number ? at_ + 1 : foreseen_.size();
}

void WeightWindow::bring(size_t number) {
  note_use(number);
  Entry& entry = entries_[number];
  if (entry.is_in) {
    by_use_.splice(by_use_.begin(), by_use_, entry.place);
    home_.use(number);
    return;
  }
  make_room(entry.bytes);
  while (!home_.has_room(number) && take_one_used_after(std::nullopt)) {
  }
  enter(number);
  home_.use(number);
  if (home_.brings_beside_operators()) {
    return;
  }
  const auto next = std::find_if(foreseen_.begin() + static_cast<std::ptrdiff_t>(at_), foreseen_.end(),
                                 [this](size_t one) { return !entries_[one].is_in; });
  if (next != foreseen_.end()) {
    home_.read_ahead(*next);
  }
}

// Storages come in the order of their uses. A storage goes out for another one only if it is used later. A storage with
// late writes finds room, and comes at its use. The copy then waits for the operators called before the room was found.
void WeightWindow::bring_ahead() {
  if (!home_.brings_beside_operators()) {
    return;
  }
  for (ahead_ = std::max(ahead_, at_); ahead_ < foreseen_.size(); ++ahead_) {
    const size_t number = foreseen_[ahead_];
    if (entries_[number].is_in) {
      continue;
    }
    while (!has_room(number)) {
      if (!take_one_used_after(ahead_)) {
        return;
      }
    }
    if (has_late_writes(entries_[number].storage)) {
      return;
    }
    enter(number);
  }
}

void WeightWindow::enter(size_t number) {
  Entry& entry = entries_[number];
  entry.is_beside = !home_.has_room(number);
  home_.bring(number);
  by_use_.push_front(number);
  entry.place = by_use_.begin();
  entry.is_in = true;
  in_ += entry.bytes;
}

bool WeightWindow::has_room(size_t number) const {
  return in_ + entries_[number].bytes <= bytes_ && home_.has_room(number);
}

void WeightWindow::make_room(int64_t bytes) {
  while (in_ + bytes > bytes_ && take_one_used_after(std::nullopt)) {
  }
}

// The position in foreseen_; its end: unknown.
size_t WeightWindow::next_use(size_t number) const {
  const std::vector<size_t>& uses = entries_[number].uses;
  const auto next = std::ranges::lower_bound(uses, at_);
  return next == uses.end() ? foreseen_.size() : *next;
}

// Takes out the storage whose next use is farthest, and behind `position`. Of several such storages, the storage used
// longest ago. An operand of an operator under way stays. False: there is none.
bool WeightWindow::take_one_used_after(std::optional<size_t> position) {
  std::optional<size_t> farthest;
  size_t latest = 0;
  for (auto number = by_use_.rbegin(); number != by_use_.rend(); ++number) {
    const size_t next = next_use(*number);
    if (entries_[*number].users == 0 && (!position || next > *position) && (!farthest || next > latest)) {
      farthest = *number;
      latest = next;
    }
  }
  if (farthest) {
    take_out(*farthest);
  }
  return farthest.has_value();
}

void WeightWindow::take_out(size_t number) {
  Entry& entry = entries_[number];
  home_.let_go(number, entry.is_written);
  entry.is_in = entry.is_written = entry.is_beside = false;
  by_use_.erase(entry.place);
  in_ -= entry.bytes;
}

void WeightWindow::take_home(const c10::Storage& storage) {
  const std::lock_guard lock(mutex_);
  const auto found = numbers_.find(storage.unsafeGetStorageImpl());
  if (found == numbers_.end()) {
    return;
  }
  if (entries_[found->second].is_in) {
    take_out(found->second);
  }
  home_.finish_copies(found->second);
}

// --- operators

OperandsInWindow::OperandsInWindow(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (!WeightWindow::exists() || is_moving) {
    return;
  }
  for (const c10::IValue& argument : torch::jit::last(stack, op.schema().arguments().size())) {
    visit_tensors_in(argument, &make_late_writes);
  }
  const std::lock_guard lock(mutex_of_windows);
  try {
    for (WeightWindow* window : windows) {
      if (auto operands = window->begin(op, stack); !operands.empty()) {
        begun_.emplace_back(window, std::move(operands));
      }
    }
  } catch (...) {
    end();
    throw;
  }
}

OperandsInWindow::~OperandsInWindow() {
  if (!begun_.empty()) {
    const std::lock_guard lock(mutex_of_windows);
    end();
  }
}

// The lock of all windows is held, since a window may have ended.
void OperandsInWindow::end() noexcept {
  for (const auto& [window, operands] : begun_) {
    if (std::ranges::find(windows, window) != windows.end()) {
      window->end(operands);
    }
  }
}

UnseenByWindows::UnseenByWindows() : is_moving_(is_moving, true) {}

at::Tensor values_at_home(const at::Tensor& weight) {
  if (!weight.has_storage()) {
    return {};
  }
  make_late_writes(weight);
  if (WeightWindow::exists()) {
    const std::lock_guard lock(mutex_of_windows);
    const UnseenByWindows unseen;
    for (WeightWindow* window : windows) {
      window->take_home(weight.storage());
    }
  }
  const at::Tensor bytes = kept_values(weight.storage());
  if (!bytes.defined()) {
    return {};
  }
  const auto size = static_cast<int64_t>(weight.element_size());
  const at::Tensor elements = bytes.narrow(0, 0, bytes.numel() / size * size).view(weight.scalar_type());
  return elements.as_strided(weight.sizes(), weight.strides(), weight.storage_offset());
}

void note_written_weight(const at::Tensor& tensor) {
  if (!WeightWindow::exists() || !tensor.has_storage()) {
    return;
  }
  const std::lock_guard lock(mutex_of_windows);
  for (WeightWindow* window : windows) {
    const std::lock_guard lock_of_one(window->mutex_);
    if (const auto found = window->numbers_.find(tensor.storage().unsafeGetStorageImpl());
        found != window->numbers_.end()) {
      window->entries_[found->second].is_written = true;
    }
  }
}

}  // namespace snug::detail
