#pragma once
// batch_norm_to_group_norm: layers that look at one sample alone. batch_norm.h compares it with other remedies.

#include <cstdint>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace snug {

/// One replacement by batch_norm_to_group_norm.
struct GroupNormChange {
  std::string name;  ///< of the layer, as in named_modules(): "stem.norm"
  int64_t channels;
  int64_t groups;
};

/// Replaces every BatchNorm in `module` with a GroupNorm (Wu & He 2018, arXiv:1803.08494). The number of groups is the
/// largest one up to `groups` that divides the channels. The new layer has the same eps, weight and bias (copied),
/// requires_grad, dtype, device and mode. A GroupNorm needs several values per group: on [N, channels] keep `groups`
/// below the number of channels. The parameters are new, so make the optimizer afterwards.
/// The replacement reaches BatchNorms in a Sequential, a ModuleList and a ModuleDict, and those that a module has only
/// registered and finds by name. Code that casts such a module to BatchNorm must be changed. A BatchNorm that is also
/// held elsewhere, by a member of its own type or a variable, cannot be replaced there.
/// Returns the replacements. Throws ConfigError, and has changed nothing, if a BatchNorm is held elsewhere (the message
/// names the layer and says what to write), if `module` itself is a BatchNorm or has none, or if groups < 1.
std::vector<GroupNormChange> batch_norm_to_group_norm(torch::nn::Module& module, int64_t groups = 32);

}  // namespace snug
