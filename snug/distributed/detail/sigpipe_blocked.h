#pragma once
// SigpipeBlocked: threads that are started in its scope do not take SIGPIPE. Gloo writes to sockets by writev(), which
// knows no MSG_NOSIGNAL, so a write to a rank that has just died ends the process before anything can say which rank it
// was. With the signal blocked the write fails with EPIPE, which they know. Python ignores the signal
// for the whole process; a library leaves that to the program.

#include <csignal>
#include <ctime>

#include <pthread.h>

namespace snug::detail {

class [[nodiscard]] SigpipeBlocked final {
 public:
  SigpipeBlocked() {
    ::sigset_t pending;
    ::sigpending(&pending);
    was_pending_ = ::sigismember(&pending, SIGPIPE) == 1;
    ::pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  /// Takes what a write of this thread has raised meanwhile.
  ~SigpipeBlocked() {
    const timespec at_once = {};
    if (!was_pending_) {
      ::sigtimedwait(&sigpipe_, nullptr, &at_once);
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SigpipeBlocked(const SigpipeBlocked&) = delete;
  SigpipeBlocked& operator=(const SigpipeBlocked&) = delete;

 private:
  static ::sigset_t only_sigpipe() {
    ::sigset_t set;
    ::sigemptyset(&set);
    ::sigaddset(&set, SIGPIPE);
    return set;
  }

  ::sigset_t sigpipe_ = only_sigpipe();
  ::sigset_t before_{};
  bool was_pending_ = false;
};

}  // namespace snug::detail
