#pragma once
// FileSizeLimit: while it lives, no file of this process can grow beyond a number of bytes, as on a full disk: a write
// is cut off there.
//
//   const FileSizeLimit limit(log_size + 20);
//   EXPECT_THROW(log.write(record), Error);

#include <csignal>
#include <cstddef>

#include <sys/resource.h>

namespace snug::testing {

class [[nodiscard]] FileSizeLimit final {
 public:
  explicit FileSizeLimit(size_t bytes) : old_handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &old_limit_);
    rlimit limit = old_limit_;
    limit.rlim_cur = bytes;
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &old_limit_);
    std::signal(SIGXFSZ, old_handler_);
  }

 private:
  void (*old_handler_)(int);
  rlimit old_limit_{};
};

}  // namespace snug::testing
