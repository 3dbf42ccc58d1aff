#pragma once
// A subcommand of the program: a function that adds the subcommand to the command line. The end of the subcommand's
// callback becomes the exit status: 0 done, 1 failed, 2 bad usage, 3 does not fit into memory, 130 interrupted (129 by
// SIGHUP, 143 by SIGTERM).

#include <CLI/CLI.hpp>

namespace snug::cli {

constexpr int kFailed = 1;
constexpr int kBadUsage = 2;
constexpr int kDoesNotFit = 3;

/// Thrown by a command that a signal ended, after everything is saved and reported. The status is the status that
/// shells give to the signal.
struct Interrupted {
  int signal;
  int status() const { return 128 + signal; }
};

void add_train(CLI::App& app);
void add_sample(CLI::App& app);
void add_report(CLI::App& app);
void add_snapshots(CLI::App& app);
void add_formats(CLI::App& app);
void add_launch(CLI::App& app);
void add_plan(CLI::App& app);
void add_compare(CLI::App& app);

/// For launch: takes the words after -- as the program to start, which the parser must not read. Returns the number of
/// words before.
int keep_program(int argc, char** argv);

}  // namespace snug::cli
