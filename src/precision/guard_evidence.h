#pragma once
// The input of PrecisionGuard, which knows no tensors: evidence from gradients, and saved states.

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/state.h"
#include "src/precision/precision_guard.h"

namespace snug::detail {

/// For the whole step (everything outside the regions), then for each region: whether a gradient is not finite, and the
/// share of zeros. A parameter belongs to every region whose name is the parameter's name or the beginning of the
/// parameter's name up to a dot. The device counts in the order of its stream, and the host does not wait. The result
/// reads the counts: the call waits until the device has counted.
using GradientEvidence = std::vector<std::pair<std::string, PrecisionGuard::Evidence>>;
std::function<GradientEvidence()> gradient_evidence(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                                                    const std::vector<std::string>& regions);

StateDict state_of(const PrecisionGuard& guard);
/// The regions saved by state_of. Throws CorruptFile, naming the entry, for any other content.
std::map<std::string, PrecisionGuard::RegionState> regions_from(const StateDict& state);

}  // namespace snug::detail
