#include "src/distributed/nccl_backend.h"

namespace snug::detail {

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const c10::intrusive_ptr<c10d::Store>& /*store*/, int /*rank*/,
                                                    int /*size*/, std::chrono::milliseconds /*timeout*/) {
  return {};
}

}  // namespace snug::detail
