#pragma once
// The program's signals: those that ask it to stop, and those that stand for an error of a write. What the program was
// started with ignored, by nohup or by a shell for a program in the background, stays ignored.

namespace snug::cli {

enum class SecondStop { EndsTheProgram, IsCounted };

/// Catches SIGINT, SIGTERM and SIGHUP from now on. What comes within a tenth of a second counts as one: `timeout` sends
/// a signal to the program and to its group, and a machine that is shut down sends several kinds. A SIGHUP is never a
/// second one, as a terminal that closes may send it more than once.
void catch_stops(SecondStop second);

/// The newest signal that asked to stop; 0: there was none.
int last_stop();
/// The number of times that the program was asked to stop.
int stops();

/// Ignores SIGPIPE or SIGXFSZ from now on: a write to a pipe that nobody reads, or beyond the largest size of a file
/// (ulimit -f), then fails and does not end the program. Call it once for each.
void ignore_signal(int signal);

/// For a child before it becomes another program, which gets SIGPIPE and SIGXFSZ as this program got them.
void restore_ignored_signals();

}  // namespace snug::cli
