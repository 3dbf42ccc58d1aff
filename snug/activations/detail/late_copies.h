#pragma once
// LateCopies: when the memory of a saved tensor is copied to where it is kept instead, by offload and by compression.
//
// By itself autograd keeps an alias of what it saves. The alias has what operators write to the memory afterwards without autograd counting it: the
// other parts of an unsafe_chunk, as in recurrent layers; what goes through .data(); an argument that is saved before the kernel fills it, as
// RReLU's noise. A copy is to have it, too. So the memory is held until the next operator that does something else than write to it, and is copied
// just before that one runs: no sooner is there need of other memory. When an operator writes to memory that was copied and is still in use, it is
// held and copied once more. Operators of other threads, and those after the scope, are not seen.

#include <compare>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "snug/memory/detail/held.h"
#include "snug/memory/detail/operator_mode.h"

namespace snug::detail {

class LateCopies;

/// A part of a storage: so many elements of a type from one of them on.
struct StoragePart {
  c10::ScalarType dtype = c10::ScalarType::Byte;
  int64_t begin = 0;
  int64_t count = 0;
  auto operator<=>(const StoragePart&) const = default;
};

/// Stands for a part of a storage that was saved, for all tensors that were saved from it. Holds the memory or has a copy. Any thread may use it.
class LateCopy {
 public:
  /// `tensor` has a storage, which is held at first. `copies` outlives this.
  LateCopy(LateCopies& copies, const at::Tensor& tensor, const StoragePart& part);
  virtual ~LateCopy();
  LateCopy(const LateCopy&) = delete;
  LateCopy& operator=(const LateCopy&) = delete;

  /// Makes the copy, if there is none, and lets go of the memory. Throws what copy() throws; then it is still held.
  void make();
  /// Makes no copy from now on.
  void keep();

 protected:
  /// Copies. false: the memory is to be kept as it is. Called without gradient mode, and no policy sees its operators.
  virtual bool copy(const c10::Storage& memory) = 0;
  /// Forgets the copy. What it was made of may be written as soon as this returns.
  virtual void forget() = 0;

  /// The memory as it is, where it is held; nullptr where there is a copy. For the holder of `mutex`.
  const c10::Storage& memory() const { return memory_; }
  const StoragePart& part() const { return part_; }

  mutable std::mutex mutex;  // guards copy and memory

 private:
  friend class LateCopies;
  enum class State { Held, Copied, Kept };

  const c10::StorageImpl* name() const { return storage_._unsafe_get_target(); }
  bool is_held() const;
  /// `memory` is or was written. true: there was a copy, and now it is held again.
  bool is_written_to(const c10::Storage& memory);
  /// Another tensor was saved from it. true: somebody has written to it unseen, and now it is held again.
  bool add(const at::Tensor& tensor);
  // Of these the mutex is held by the caller.
  bool hold_again(const c10::Storage& memory);
  void hold(const c10::Storage& memory);

  LateCopies& copies_;
  const StoragePart part_;
  // Does not hold the memory, but its address, which is given to no other one meanwhile.
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  State state_ = State::Held;
  c10::Storage memory_;                // unless Copied
  std::optional<c10::Stream> stream_;  // that the values of memory are computed on
  std::vector<WriteCount> writes_;     // of the tensors, one for each counter that they have
};

/// All copies of one policy. An OperatorScope shows it the operators of the thread whose saved tensors the policy gets.
class LateCopies final : public OperatorPolicy {
 public:
  void call(const OperatorCall& call, Stack& stack) override;
  void unseen_write(const at::Tensor& tensor) override {
    if (tensor.has_storage()) {
      hold_again(tensor.storage());
    }
  }

  /// What stands for this part of the tensor's storage already; nullptr if nothing does.
  std::shared_ptr<LateCopy> find(const at::Tensor& tensor, const StoragePart& part);
  void add(const std::shared_ptr<LateCopy>& copy);
  /// No operator is seen from now on. Where no copy can be made, the memory is kept.
  void make_all() noexcept;

 private:
  friend class LateCopy;
  void make_but(const std::vector<c10::Storage>& written);
  void hold_again(const c10::Storage& memory);
  std::vector<std::shared_ptr<LateCopy>> copies_of(const c10::StorageImpl* name) const;
  void forget(const LateCopy& dead);

  mutable std::mutex mutex_;  // guards of_storage_
  // By part: a loop over the steps of a sequence may save thousands of one storage, and a save must not walk them all.
  std::unordered_map<const c10::StorageImpl*, std::map<StoragePart, std::weak_ptr<LateCopy>>> of_storage_;
  std::vector<std::weak_ptr<LateCopy>> held_;  // for the thread whose operators are seen
};

}  // namespace snug::detail
