#pragma once
// The program's signals: signals that ask the program to stop, and signals that stand for an error of a write. A signal
// that was ignored when the program started stays ignored. Such signals are ignored by nohup, or by a shell for a
// program in the background.

namespace snug::cli {

enum class SecondStop { EndsTheProgram, IsCounted };

/// Catches SIGINT, SIGTERM and SIGHUP from now on. All signals within a tenth of a second count as one request:
/// `timeout` sends a signal to the program and to the program's group, and a machine that is shut down sends several
/// kinds. A SIGHUP never counts as a second request, because a closing terminal may send SIGHUP more than once.
void catch_stops(SecondStop second);

/// The newest signal that asked to stop; 0: no signal yet.
int last_stop();
/// The number of times that the program was asked to stop.
int stops();

/// Ignores SIGPIPE or SIGXFSZ from now on. A write to a pipe without a reader, or beyond the largest size of a file
/// (ulimit -f), then fails and does not end the program. Call ignore_signal once for each signal.
void ignore_signal(int signal);

/// For a child before the child becomes another program. The other program gets SIGPIPE and SIGXFSZ as this program got
/// both signals.
void restore_ignored_signals();

}  // namespace snug::cli
