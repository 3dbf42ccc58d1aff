#include "tests/support/simd_targets.h"

#include <cstdint>

#include <hwy/targets.h>

namespace snug::kernels::detail {

std::vector<std::string> simd_targets() {
  std::vector<std::string> names;
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    names.emplace_back(hwy::TargetName(target));
  }
  return names;
}

void use_simd_target(const std::string& name) {
  hwy::SetSupportedTargetsForTest(0);
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    if (name == hwy::TargetName(target)) {
      hwy::SetSupportedTargetsForTest(target);
    }
  }
  // The next call chooses anew.
  hwy::GetChosenTarget().DeInit();
}

}  // namespace snug::kernels::detail
