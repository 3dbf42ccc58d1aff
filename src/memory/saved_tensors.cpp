#include <utility>

#include "snug/core.h"
#include "snug/memory.h"
#include "src/memory/saved_tensor_policy.h"

namespace snug {
namespace {

class FunctionPolicy final : public detail::SavedTensorPolicy {
 public:
  FunctionPolicy(std::function<std::any(const at::Tensor&)> pack, std::function<at::Tensor(std::any&)> unpack)
      : pack_(std::move(pack)), unpack_(std::move(unpack)) {}
  std::any pack(const at::Tensor& tensor) override { return pack_(tensor); }
  at::Tensor unpack(std::any& packed) override { return unpack_(packed); }

 private:
  std::function<std::any(const at::Tensor&)> pack_;
  std::function<at::Tensor(std::any&)> unpack_;
};

}  // namespace

SavedTensorHooks::SavedTensorHooks(std::function<std::any(const at::Tensor&)> pack,
                                   std::function<at::Tensor(std::any&)> unpack) {
  if (!pack || !unpack) {
    throw ConfigError("SavedTensorHooks: pack and unpack must both be callable; one of them is empty");
  }
  scope_ = std::make_unique<detail::PolicyScope>(std::make_shared<FunctionPolicy>(std::move(pack), std::move(unpack)));
}

SavedTensorHooks::~SavedTensorHooks() = default;

}  // namespace snug
