#pragma once
// SavedTensorHooks: decides how autograd keeps the tensors that backward will need, while the guard lives, on this
// thread. The C++ twin of Python's torch.autograd.graph.saved_tensors_hooks, and the basis of checkpointing and
// offload.
//
//   snug::SavedTensorHooks in_bf16(
//       [](const Tensor& t) {   // indices and what is narrow already stay as they are
//         return std::any(std::pair(t.dtype() == torch::kFloat ? t.to(torch::kBFloat16) : t.detach(),
//                                   t.scalar_type()));
//       },
//       [](std::any& kept) {
//         const auto& [tensor, dtype] = std::any_cast<std::pair<Tensor, torch::ScalarType>&>(kept);
//         return tensor.to(dtype);
//       });
//   auto loss = model->forward(x).sum();    // saved tensors went through the first function
//   loss.backward();                        // and come back through the second

#include <any>
#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

namespace snug {
namespace detail {
class PolicyScope;
}

/// While it lives, every tensor that autograd saves on this thread is handed to `pack`, and autograd keeps the result
/// of `pack` instead. `unpack` returns the tensor (same sizes, dtype and device) each time backward needs it.
/// - Only the innermost hooks are asked. Parameters, views and outputs arrive too.
/// - `pack` runs without gradient mode and must not write to its argument. Keep `t.detach()`, never `t` itself, which
///   may be the output of the node that saves it.
/// - `unpack` may return the same tensor to several callers. A custom Function gets a copy where something else uses
///   the tensor's memory, so that it may return it as a gradient.
/// - As without hooks, it is an error in backward if a tensor was written in place after it was saved.
/// - Backward passes that begin while the hooks live stay on this thread, also on a GPU.
/// - If another library, such as Python's torch, has installed its own autograd engine, that engine goes on working.
///   Python's hooks are the inner ones if they began later. An engine that is installed while hooks live hides them
///   until the next hooks begin.
class [[nodiscard]] SavedTensorHooks final {
 public:
  SavedTensorHooks(std::function<std::any(const at::Tensor&)> pack, std::function<at::Tensor(std::any&)> unpack);
  ~SavedTensorHooks();
  SavedTensorHooks(const SavedTensorHooks&) = delete;
  SavedTensorHooks& operator=(const SavedTensorHooks&) = delete;

 private:
  std::unique_ptr<detail::PolicyScope> scope_;
};

}  // namespace snug
