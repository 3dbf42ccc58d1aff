#pragma once
// A subcommand of the program: a function that adds it to the command line. What the callback stores in `status` becomes the exit
// status: 0 done, 1 failed, 2 bad usage, 3 does not fit into the memory it was given.

#include <CLI/CLI.hpp>

namespace snug::cli {

constexpr int kFailed = 1;
constexpr int kBadUsage = 2;
constexpr int kDoesNotFit = 3;

void add_train(CLI::App& app);
void add_sample(CLI::App& app);
void add_report(CLI::App& app);

}  // namespace snug::cli
