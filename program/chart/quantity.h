#pragma once
// The kind of numbers in a chart, which decides how they are written.

namespace snug::chart {

enum class Quantity {
  Number,  ///< very small or large ones get a common power of ten
  Count,   ///< 1 k, 1 M; never fractions
  Bytes,   ///< KiB, MiB, GiB
};

}  // namespace snug::chart
