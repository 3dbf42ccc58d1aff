#pragma once
// The saved-tensor seam, for the library's own use: what SavedTensorHooks offers to users, as an interface.

#include <any>
#include <memory>

#include <ATen/core/Tensor.h>

#include "snug/memory/detail/backward_pass.h"

namespace snug::detail {

/// What happens to a tensor that autograd saves. Kept alive by every tensor it packed. Methods may be called from any of
/// autograd's threads.
class SavedTensorPolicy {
 public:
  virtual ~SavedTensorPolicy() = default;
  /// Called without gradient mode. Must not keep `tensor` itself (a detached alias is fine).
  virtual std::any pack(const at::Tensor& tensor) = 0;
  virtual at::Tensor unpack(std::any& packed) = 0;
};

/// Makes `policy` the one that is asked on this thread, while the scope lives. nullptr: autograd's own way.
class [[nodiscard]] PolicyScope final {
 public:
  explicit PolicyScope(std::shared_ptr<SavedTensorPolicy> policy);
  ~PolicyScope();
  PolicyScope(const PolicyScope&) = delete;
  PolicyScope& operator=(const PolicyScope&) = delete;

 private:
  BackwardOnThisThread backward_;
};

/// The policy that is asked on this thread now; nullptr if it is autograd's own way.
std::shared_ptr<SavedTensorPolicy> current_policy();

/// Tells the memory meters that the storage of `tensor` is held for backward. Packed tensors are marked by the seam itself;
/// a policy that holds some elsewhere marks those.
void mark_as_saved(const at::Tensor& tensor);

/// Puts snug's engine in front of the one that is there, if it is not in front already.
void install_engine();

}  // namespace snug::detail
