#pragma once
// Reduction: how many values become one: the items of a loss, or the ranks' gradients.

namespace snug {

enum class Reduction { Sum, Mean };

}  // namespace snug
