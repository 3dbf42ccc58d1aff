#include "snug/activations/detail/kept_elsewhere.h"

#include <utility>

#include <ATen/ATen.h>

namespace snug::detail {
namespace {

class InBFloat16 final : public SavedTensorPolicy {
 public:
  std::any pack(const at::Tensor& tensor) override {
    const bool is_wide = at::isFloatingType(tensor.scalar_type()) && tensor.element_size() > 2;
    const at::Tensor kept = is_wide ? tensor.to(at::kBFloat16) : tensor;
    mark_as_saved(kept);
    return std::pair(kept, tensor.scalar_type());
  }
  at::Tensor unpack(std::any& packed) override {
    const auto& [kept, dtype] = std::any_cast<std::pair<at::Tensor, c10::ScalarType>&>(packed);
    return kept.to(dtype, /*non_blocking=*/false, /*copy=*/true);
  }
};

}  // namespace

std::shared_ptr<SavedTensorPolicy> compress_packer() {
  static const auto packer = std::make_shared<InBFloat16>();
  return packer;
}

}  // namespace snug::detail
