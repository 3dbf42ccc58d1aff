#pragma once
// PrecisionScope: names a region of forward, so that dynamic precision can move it to FP32 when 16 bits overflow or
// underflow there.
//
//   Tensor forward(Tensor x) {
//     snug::PrecisionScope scope("blocks.3");     // parameters blocks.3.*
//     return block->forward(x);
//   }

#include <memory>
#include <string>

namespace snug {

/// Has an effect only inside a step of a Stepper with precision_guard, and only if the guard has moved the region.
/// Autocast then casts to FP32 instead of to 16 bits, inputs that arrive in 16 bits included. Scopes nest; a scope
/// inside a moved one moves with it.
class [[nodiscard]] PrecisionScope final {
 public:
  /// `name`: the beginning of the names of the parameters used inside, up to a dot.
  explicit PrecisionScope(std::string name);
  ~PrecisionScope();
  PrecisionScope(const PrecisionScope&) = delete;
  PrecisionScope& operator=(const PrecisionScope&) = delete;

 private:
  class Full;
  std::unique_ptr<Full> full_;
};

}  // namespace snug
