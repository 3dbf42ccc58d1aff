#include "src/memory/gradients_outside.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "src/core/file_memory.h"
#include "src/core/host_memory.h"
#include "src/memory/cpu_allocator.h"
#include "src/memory/operator_mode.h"

namespace snug::detail {
namespace {

// `count` elements from `begin` on, in the order of memory.
at::Tensor elements(const at::Tensor& tensor, int64_t begin, int64_t count) {
  return tensor.as_strided({count}, {1}, tensor.storage_offset() + begin);
}

at::Tensor room_for(const at::Tensor& parameter, bool is_pinned) {
  const auto allocate = [&] {
    return at::empty_strided(parameter.sizes(), parameter.strides(),
                             parameter.options().device(at::kCPU).pinned_memory(is_pinned));
  };
  return is_pinned ? in_host_memory("Stepper", "the gradients", "or leave `offload` out", allocate) : allocate();
}

}  // namespace

void GradientsOutside::drop() {
  hooks_.reset();
  gradients_.clear();
}

void GradientsOutside::collect(const std::vector<Collected>& parameters,
                               const std::optional<std::filesystem::path>& directory) {
  const at::NoGradGuard no_grad;
  const auto files = directory ? std::make_unique<AllocationsInFile>(*directory) : nullptr;
  hooks_ = std::make_unique<GradientHooks>();
  std::unordered_map<const void*, Gradient> before = std::exchange(gradients_, {});
  try {
    for (const auto& [leaf, parameter] : parameters) {
      const void* key = parameter.unsafeGetTensorImpl();
      const auto known = before.find(key);
      Gradient& gradient = gradients_[key];
      // The program may hold the gradient of the last step.
      const bool is_free =
          known != before.end() && known->second.sum.use_count() == 1 && known->second.sum.storage().use_count() == 1 &&
          known->second.sum.sizes() == parameter.sizes() && known->second.sum.strides() == parameter.strides() &&
          known->second.sum.scalar_type() == parameter.scalar_type();
      gradient.sum = is_free ? std::move(known->second.sum) : room_for(parameter, /*is_pinned=*/!directory);
      hooks_->set(
          leaf, [&gradient](const at::Tensor& complete) { add(gradient, complete); },
          GradientHooks::Runs::InProfilesToo);
    }
  } catch (...) {
    drop();
    throw;
  }
}

// Adds with the bits of autograd's own sum, element by element.
void GradientsOutside::add(Gradient& to, const at::Tensor& parameter) {
  constexpr int64_t kAtOnce = 1 << 20;  // elements
  const at::NoGradGuard no_grad;
  const UnseenOperators unseen;
  at::Tensor& from = parameter.mutable_grad();
  if (from.layout() != at::kStrided) {  // a first gradient of another layout stays in memory
    if (to.is_there) {
      to.sum.add_(from.to(to.sum.device()));
      from.reset();
    }
    return;
  }
  const bool is_first = !std::exchange(to.is_there, true);
  const auto add_some = [&](at::Tensor sum, const at::Tensor& more) {
    const bool is_as_it_comes = is_first && more.scalar_type() == sum.scalar_type();
    const at::Tensor here = is_as_it_comes ? more : more.to(sum.device());  // the host widens the numbers
    is_first ? sum.copy_(here) : sum.add_(here);
    let_go_of_pages(sum);
  };
  if (from.strides() == to.sum.strides() && from.is_non_overlapping_and_dense()) {
    for (int64_t begin = 0; begin < from.numel(); begin += kAtOnce) {
      const int64_t count = std::min(kAtOnce, from.numel() - begin);
      add_some(elements(to.sum, begin, count), elements(from, begin, count));
    }
  } else {
    add_some(to.sum, from);
  }
  from.reset();
}

void GradientsOutside::lend(const NamedTensors& parameters, bool lent) {
  for (const auto& [name, parameter] : parameters) {
    const auto found = gradients_.find(parameter.unsafeGetTensorImpl());
    at::Tensor& gradient = parameter.mutable_grad();
    if (found == gradients_.end() || !found->second.is_there) {
      continue;
    }
    if (lent && !gradient.defined()) {
      gradient = found->second.sum;
    } else if (!lent && gradient.is_same(found->second.sum)) {
      gradient.reset();
    }
  }
}

}  // namespace snug::detail
