#pragma once
// The kind of numbers in a chart, which decides the numbers' format.

namespace snug::chart {

enum class Quantity {
  Number,  ///< very small or large numbers get a common power of ten
  Count,   ///< 1 k, 1 M; never fractions
  Bytes,   ///< KiB, MiB, GiB
};

}  // namespace snug::chart
