#pragma once
// The schedule of forward and backward, recorded while a chain of equal blocks is trained in four ways: plain, in
// segments, nested, and by an automatic plan.

#include "program/compare/exhibit.h"

namespace snug::cli {

/// Runs a step in each of the four ways.
Schedule recorded_schedule(c10::Device device);

/// The figure.
Exhibit schedule_exhibit(Schedule schedule);

/// "12 equal blocks, recorded: plain: at most 12 results in memory, 0 runs again; nested: ..."
std::string schedule_finding(const Schedule& schedule);

}  // namespace snug::cli
