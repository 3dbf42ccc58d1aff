#pragma once
// Reduction: what becomes of many values, of a loss's items or of the ranks' gradients.

namespace snug {

enum class Reduction { Sum, Mean };

}  // namespace snug
