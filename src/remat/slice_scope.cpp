#include "src/remat/slice_scope.h"

namespace snug::detail {

SliceScope*& SliceScope::innermost() {
  thread_local SliceScope* scope = nullptr;
  return scope;
}

}  // namespace snug::detail
