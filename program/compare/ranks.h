#pragma once
// An experiment on several ranks: the program starts itself on each of them with `snug launch`. As a rank it does not
// run the experiment but what Experiment::run_as_rank says; rank 0 prints what was measured, a line each, behind a word
// that begins it.

#include <string>
#include <string_view>
#include <vector>

#include "program/compare/experiment.h"

namespace snug::cli {

/// What follows `begin` in the lines that the ranks of `snug compare EXPERIMENT` print, in order. Throws Error unless
/// they are `count` and the ranks succeed.
std::vector<std::string> lines_of_ranks(std::string_view experiment, int ranks, const CompareFlags& flags,
                                        std::string_view begin, size_t count);

}  // namespace snug::cli
