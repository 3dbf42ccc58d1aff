#pragma once
// PrecisionScope: names a region of forward, so that dynamic precision may move it to FP32 by itself when 16 bits do not do.
//
//   Tensor forward(Tensor x) {
//     snug::PrecisionScope scope("blocks.3");     // parameters blocks.3.*
//     return block->forward(x);
//   }

#include <memory>
#include <string>

namespace snug {

/// Has an effect only inside a step of a Stepper with precision_guard, and where its guard has moved the region: then autocast casts to
/// FP32 what it would cast to 16 bits, inputs that come in 16 bits included. Scopes nest; one inside a moved one is moved with it.
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
