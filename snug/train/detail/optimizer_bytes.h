#pragma once
// What an optimizer will allocate, as far as that can be told before it steps.

#include <cstdint>

namespace torch::optim {
class Optimizer;
}

namespace snug::detail {

/// Bytes that an optimizer allocates and gives back in a step. snug's say so themselves; of torch's, which go parameter by parameter, about three
/// times the largest.
int64_t workspace_bytes(const torch::optim::Optimizer& optimizer);

/// Bytes of state that an optimizer will allocate in its first step, for the parameters that it has none for. Right for snug's,
/// and for torch's Adam, AdamW, RMSprop and SGD; 0 for others: then the second step plans again.
int64_t state_bytes_to_come(const torch::optim::Optimizer& optimizer);

}  // namespace snug::detail
