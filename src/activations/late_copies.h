#pragma once
// LateCopies: the moment at which offload copies the memory of a saved tensor.
//
// By itself autograd keeps an alias of a saved tensor. The alias sees later writes that autograd does not count:
// - writes to other parts of an unsafe_chunk, as in recurrent layers;
// - writes through .data();
// - writes to an argument that is saved before the kernel fills the argument, such as RReLU's noise.
//
// A copy must have the values of these writes too. Therefore the memory stays until the next operator that does not
// write to it, and is copied just before this operator runs; no other memory is needed earlier. If an operator writes
// to memory that was copied and is still in use, the memory stays and is copied once more. Operators of other threads,
// and operators after the scope, are not seen.

#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "src/core/has_bytes.h"
#include "src/memory/held.h"
#include "src/memory/operator_mode.h"

namespace snug::detail {

class LateCopies;

/// A saved storage, shared by all tensors that were saved from the storage. The object keeps the memory or has a copy.
/// Any thread may use the object.
class LateCopy {
 public:
  /// `tensor` has bytes, and the object keeps the bytes' memory at first. `copies` must outlive this object.
  LateCopy(LateCopies& copies, const at::Tensor& tensor);
  virtual ~LateCopy();
  LateCopy(const LateCopy&) = delete;
  LateCopy& operator=(const LateCopy&) = delete;

  /// Makes the copy, unless the copy exists, and releases the memory. Throws any exception of copy(); the object then
  /// still keeps the memory.
  void make();
  /// Makes no copy from now on.
  void keep();

 protected:
  /// Makes the copy. Returns false if the memory itself must be kept. Runs without gradient mode, and no policy sees
  /// its operators.
  virtual bool copy(const c10::Storage& memory) = 0;
  /// Forgets the copy. The memory that was copied may be written as soon as the function returns.
  virtual void forget() = 0;

  /// The memory, unless a copy exists; nullptr for a copy. The caller must have locked `mutex`.
  const c10::Storage& memory() const { return memory_; }

  mutable std::mutex mutex;  // guards copy and memory

 private:
  friend class LateCopies;
  enum class State { Held, Copied, Kept };

  const c10::StorageImpl* name() const { return storage_._unsafe_get_target(); }
  bool is_held() const;
  /// `memory` is being written, or was. Returns true if a copy existed; the object then keeps the memory again.
  bool is_written_to(const c10::Storage& memory);
  /// Another tensor was saved from the memory. Returns true if the memory was written unseen; the object then keeps the
  /// memory again.
  bool add(const at::Tensor& tensor);
  // The caller has locked the mutex for the next two functions.
  bool hold_again(const c10::Storage& memory);
  void hold(const c10::Storage& memory);

  LateCopies& copies_;
  // Does not keep the memory alive, but keeps other memory from getting the address.
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  const size_t bytes_;
  State state_ = State::Held;
  c10::Storage memory_;                // unless Copied
  std::optional<c10::Stream> stream_;  // the stream that computes the memory's values
  std::vector<WriteCount> writes_;     // a count for each different counter of the tensors
};

/// All copies of one policy. An OperatorScope shows LateCopies the operators of the thread whose saved tensors the
/// policy gets.
class LateCopies final : public OperatorPolicy {
 public:
  void call(const OperatorCall& call, Stack& stack) override;
  void unseen_write(const at::Tensor& tensor) override {
    if (has_bytes(tensor)) {
      hold_again(tensor.storage());
    }
  }

  /// The LateCopy of the tensor's storage, or nullptr. A storage of another size than before has none.
  std::shared_ptr<LateCopy> find(const at::Tensor& tensor);
  void add(const std::shared_ptr<LateCopy>& copy);
  /// Ends the scope: no operator is seen from now on. Memory that cannot be copied is kept.
  void make_all() noexcept;

 private:
  friend class LateCopy;
  void make_but(const std::vector<c10::Storage>& written);
  void hold_again(const c10::Storage& memory);
  std::shared_ptr<LateCopy> copy_of(const c10::Storage& memory) const;
  void forget(const LateCopy& dead);

  mutable std::mutex mutex_;  // guards of_storage_
  std::unordered_map<const c10::StorageImpl*, std::weak_ptr<LateCopy>> of_storage_;
  std::vector<std::weak_ptr<LateCopy>> held_;  // used only by the thread whose operators are seen
};

}  // namespace snug::detail
