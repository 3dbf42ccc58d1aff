
#include <ATen/autocast_mode.h>

#include "snug/precision.h"
#include "src/precision/precision_regions.h"

namespace snug {

// Autocast to FP32: LibTorch casts to the type that is set. Tensors in FP32 already are not cast and not cached.
class PrecisionScope::Full {
 public:
  explicit Full(c10::DeviceType device) : device_(device), previous_(at::autocast::get_autocast_dtype(device)) {
    at::autocast::set_autocast_dtype(device_, c10::ScalarType::Float);
  }
  ~Full() { at::autocast::set_autocast_dtype(device_, previous_); }
  Full(const Full&) = delete;
  Full& operator=(const Full&) = delete;

 private:
  c10::DeviceType device_;
  c10::ScalarType previous_;
};

PrecisionScope::PrecisionScope(std::string name) {
  detail::PrecisionRegions* const current = detail::current_precision_regions();
  if (current == nullptr) {
    return;
  }
  if (!name.empty()) {  // the empty name is the whole step, which is not a region
    current->enter(name);
  }
  if (current->in_full.contains(name) && at::autocast::is_autocast_enabled(current->device)) {
    full_ = std::make_unique<Full>(current->device);
  }
}

PrecisionScope::~PrecisionScope() = default;

}  // namespace snug
