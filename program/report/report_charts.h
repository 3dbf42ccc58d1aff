#pragma once
// The charts of the report page, each as HTML, from the records of a run. Internal to report.

#include <string>
#include <vector>

#include "program/report/run_log.h"

namespace snug::detail {

/// Steps ascending. Every function accepts empty records.
using Records = std::vector<StepRecord>;

std::string loss_chart(const Records& records);
std::string learning_rate_chart(const Records& records);
std::string gradient_norm_chart(const Records& records);
/// Empty if the gradient noise was not measured.
std::string gradient_noise_chart(const Records& records);
std::string loss_scale_chart(const Records& records);

/// `item`: the noun for the counted items, in the plural.
std::string throughput_chart(const Records& records, const std::string& item);

/// The memory at the peak of each step by category, over the step.
std::string memory_chart(const Records& records);

/// The memory at the highest peak of the run: a bar for each category.
std::string memory_peak(const Records& records);

}  // namespace snug::detail
