#pragma once
// Selective checkpointing: the operators whose results a checkpointed region keeps. Its recomputation takes these
// results instead of running the operators again. Matrix products are most of the time and few of the bytes; keeping
// them makes recomputation nearly free.
//
//   auto y = snug::checkpoint({.policy = snug::save_matmuls}, block, x);
//   auto z = snug::checkpoint({.policy = snug::policy_of({{"aten::exp", snug::Keep::Save}})}, block, x);

#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace snug {

/// The treatment of an operator's result in a checkpointed region.
enum class Keep {
  Recompute,  ///< dropped; run again when backward needs it
  Save,       ///< kept until the region's backward is done
  Offload,    ///< kept as SaveOnHost keeps it, with its default options
};

/// Asked for each operator of the forward, by its name without overload, such as "aten::mm". Operators are those below
/// autograd: a linear layer is aten::addmm, or aten::mm and aten::add_; attention is one operator, with a different
/// name on each device. Views, results of in-place operators and casts are always recomputed, whatever the policy says.
using CheckpointPolicy = std::function<Keep(std::string_view operator_name)>;

/// Saves matrix products and convolutions.
Keep save_matmuls(std::string_view operator_name);
/// Saves fused attention (aten::scaled_dot_product_attention's operators).
Keep save_attention(std::string_view operator_name);
/// Saves all results but those of elementwise operators, norms, softmax and copies, which are cheap to run again.
Keep recompute_pointwise(std::string_view operator_name);

/// The policy that `names` give, and Keep::Recompute for all other operators. Throws ConfigError for a name that no
/// operator of LibTorch has.
CheckpointPolicy policy_of(std::map<std::string, Keep> names);

}  // namespace snug
