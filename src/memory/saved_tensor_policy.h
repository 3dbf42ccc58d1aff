#pragma once
// The interface for saved tensors inside the library. SavedTensorHooks is the public form of the interface.

#include <any>
#include <memory>

#include <ATen/core/Tensor.h>

#include "src/memory/backward_pass.h"

namespace snug::detail {

/// Decides how a tensor that autograd saves is kept. Every tensor packed by a policy keeps the policy alive. Methods
/// may be called from any of autograd's threads.
class SavedTensorPolicy {
 public:
  virtual ~SavedTensorPolicy() = default;
  /// Called without gradient mode. Must not keep `tensor` itself (a detached alias is fine).
  virtual std::any pack(const at::Tensor& tensor) = 0;
  virtual at::Tensor unpack(std::any& packed) = 0;
  /// Whether the caller alone gets the memory of `unpacked`, which unpack() has just returned: the policy does not look
  /// at the memory again when `packed` is gone. Asked in cases in which a copy is made otherwise (not_adopted.h).
  virtual bool gives_away(std::any& /*packed*/, const at::Tensor& /*unpacked*/) { return false; }
};

/// Asks `policy` about this thread's saved tensors until the end of the scope. nullptr: autograd's own behaviour.
class [[nodiscard]] PolicyScope final {
 public:
  explicit PolicyScope(std::shared_ptr<SavedTensorPolicy> policy);
  ~PolicyScope();
  PolicyScope(const PolicyScope&) = delete;
  PolicyScope& operator=(const PolicyScope&) = delete;

 private:
  BackwardOnThisThread backward_;
};

/// The policy that is asked on this thread now; nullptr for autograd's own behaviour.
std::shared_ptr<SavedTensorPolicy> current_policy();

/// Tells the memory meters that autograd keeps the storage of `tensor` for backward. Packed tensors are marked
/// automatically; a policy that keeps some packed tensors elsewhere marks the tensors itself.
void mark_as_saved(const at::Tensor& tensor);

/// Puts snug's engine in front of the current engine, unless snug's engine is in front already.
void install_engine();

}  // namespace snug::detail
