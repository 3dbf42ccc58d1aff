#include "program/output.h"

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

namespace snug::cli {

void show(std::FILE* file, std::string_view text) {
  static bool is_told = false;
  std::clearerr(file);
  std::fwrite(text.data(), 1, text.size(), file);
  std::fflush(file);
  if (const int reason = errno; std::ferror(file) != 0 && file == stdout && !std::exchange(is_told, true)) {
    show(stderr, "snug: standard output cannot be written: " + std::generic_category().message(reason) +
                     "; this goes on without it\n");
  }
}

}  // namespace snug::cli
