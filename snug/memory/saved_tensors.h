#pragma once
// SavedTensorHooks: decide how autograd keeps the tensors that backward will need, while the guard lives, on this thread.
// The C++ twin of Python's torch.autograd.graph.saved_tensors_hooks, and the seam under checkpointing and offload.
//
//   snug::SavedTensorHooks in_bf16(
//       [](const Tensor& t) {   // indices and what is narrow already stay as they are
//         return std::any(std::pair(t.dtype() == torch::kFloat ? t.to(torch::kBFloat16) : t.detach(), t.scalar_type()));
//       },
//       [](std::any& kept) {
//         const auto& [tensor, dtype] = std::any_cast<std::pair<Tensor, torch::ScalarType>&>(kept);
//         return tensor.to(dtype);
//       });
//   auto loss = model->forward(x).sum();    // what it saves went through the first function
//   loss.backward();                        // and comes back through the second

#include <any>
#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

namespace snug {
namespace detail {
class PolicyScope;
}

/// While it lives, every tensor that autograd saves on this thread is handed to `pack`, and what that returns is kept
/// instead; `unpack` gives the tensor back (same sizes, dtype and device) each time backward needs it. It may give the
/// same one to several: a custom Function gets a copy where something else uses its memory, so that it may return it as
/// a gradient. The innermost hooks alone are asked. Parameters, views and outputs arrive too. `pack` runs without
/// gradient mode and must not write to its argument; keep `t.detach()`, never `t` itself, which may be the output of
/// the node that saves it. As without hooks, a tensor that was written in place after it was saved is an error in
/// backward. Backward passes that begin while it lives stay on this thread, on a GPU, too. Where another library, such
/// as Python's torch, has installed its own autograd engine, that one goes on working; hooks of Python's are the inner
/// ones where they began later. An engine that is installed while hooks live hides them until the next ones begin.
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
