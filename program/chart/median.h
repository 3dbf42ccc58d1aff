#pragma once
// The median of measured values.

#include <vector>

namespace snug::chart {

/// The middle of the finite values, or the mean of the two middle values; NaN without finite values.
double median(std::vector<double> values);

}  // namespace snug::chart
