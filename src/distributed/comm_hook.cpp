#include "snug/distributed/data_parallel.h"
#include "snug/distributed/process_group.h"

namespace snug {
namespace {

CommHook hook_in(c10::ScalarType dtype) {
  return [dtype](GradientBucket bucket, ProcessGroup& group) -> std::function<void()> {
    const at::Tensor small = bucket.gradients.to(dtype);
    auto wait = group.start_all_reduce(small);
    return [wait = std::move(wait), small, gradients = bucket.gradients] {
      wait();
      gradients.copy_(small);
    };
  };
}

}  // namespace

CommHook float16_hook() { return hook_in(c10::ScalarType::Half); }
CommHook bfloat16_hook() { return hook_in(c10::ScalarType::BFloat16); }

}  // namespace snug
