#pragma once
// The interface for saved tensors inside the library. SavedTensorHooks is its public form.

#include <any>
#include <memory>

#include <ATen/core/Tensor.h>

#include "src/memory/backward_pass.h"

namespace snug::detail {

/// Decides what happens to a tensor that autograd saves. Every tensor that a policy packed keeps the policy alive.
/// Methods may be called from any of autograd's threads.
class SavedTensorPolicy {
 public:
  virtual ~SavedTensorPolicy() = default;
  /// Called without gradient mode. Must not keep `tensor` itself (a detached alias is fine).
  virtual std::any pack(const at::Tensor& tensor) = 0;
  virtual at::Tensor unpack(std::any& packed) = 0;
  /// Whether the memory of `unpacked`, which unpack() has just returned, is for who has asked alone: when `packed` is
  /// gone the policy does not look at it again. Asked where else a copy would be made (not_adopted.h).
  virtual bool gives_away(std::any& /*packed*/, const at::Tensor& /*unpacked*/) { return false; }
};

/// While it lives, `policy` is asked on this thread. nullptr: autograd's own behaviour.
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

/// Tells the memory meters that the storage of `tensor` is held for backward. Packed tensors are marked automatically;
/// a policy that holds some of them elsewhere marks those itself.
void mark_as_saved(const at::Tensor& tensor);

/// Puts snug's engine in front of the current one, if it is not in front already.
void install_engine();

}  // namespace snug::detail
