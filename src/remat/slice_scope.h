#pragma once
// SliceScope: during its lifetime, snug::sliced on this thread cuts into this number of slices, unless the options of
// snug::sliced give a number.

#include <cstdint>

#include "src/core/replaced.h"

namespace snug::detail {

class [[nodiscard]] SliceScope final {
 public:
  explicit SliceScope(int64_t slices) : slices_(slices), innermost_(innermost(), this) {}

  /// Whether snug::sliced asked for the number.
  bool was_asked() const { return was_asked_; }

  /// Called by snug::sliced. Returns the number of slices: 1 outside of a scope.
  static int64_t ask() {
    SliceScope* const scope = innermost();
    if (scope == nullptr) {
      return 1;
    }
    scope->was_asked_ = true;
    return scope->slices_;
  }

 private:
  static SliceScope*& innermost();

  int64_t slices_;
  Replaced<SliceScope*> innermost_;
  bool was_asked_ = false;
};

}  // namespace snug::detail
