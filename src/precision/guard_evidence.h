#pragma once
// What PrecisionGuard, which knows no tensors, needs to be told and saved.

#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/precision_guard.h"
#include "snug/state.h"

namespace snug::detail {

/// For the whole step (what is in no region), then for each region: whether a gradient is not finite, and the share of
/// zeros. A parameter belongs to the regions whose name is its own or the beginning of it up to a dot. Waits for the
/// device once.
std::vector<std::pair<std::string, PrecisionGuard::Evidence>> gradient_evidence(
    const std::vector<std::pair<std::string, at::Tensor>>& parameters, const std::vector<std::string>& regions);

StateDict state_of(const PrecisionGuard& guard);
/// What state_of saved. Throws CorruptFile, naming the entry, for anything else.
std::map<std::string, PrecisionGuard::RegionState> regions_from(const StateDict& state);

}  // namespace snug::detail
