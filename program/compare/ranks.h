#pragma once
// An experiment on several ranks: the program starts itself on each rank with `snug launch`. As a rank the program runs
// only Experiment::run_as_rank. Rank 0 prints the measurements, a line each, and each line begins with a fixed text.

#include <string>
#include <string_view>
#include <vector>

#include "program/compare/experiment.h"

namespace snug::cli {

/// The parts after `begin` of the lines that the ranks of `snug compare EXPERIMENT` print, in order. Throws Error
/// unless `count` lines come and the ranks succeed.
std::vector<std::string> lines_of_ranks(std::string_view experiment, int ranks, const CompareFlags& flags,
                                        std::string_view begin, size_t count);

}  // namespace snug::cli
