#include "src/core/unnamed_file.h"

#include <cerrno>
#include <cstdlib>
#include <string>

#include <fcntl.h>
#include <unistd.h>

namespace snug::detail {

std::filesystem::path lasting(const std::filesystem::path& directory) {
  return directory.empty() ? directory : std::filesystem::absolute(directory);
}

int open_unnamed(const std::filesystem::path& directory) {
  const int descriptor = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
  const bool is_unknown = descriptor < 0 && (errno == EOPNOTSUPP || errno == EISDIR);
  return is_unknown ? open_and_unlink(directory) : descriptor;
}

int open_and_unlink(const std::filesystem::path& directory) {
  std::string name = (directory / kUnnamedPrefix).string() + "XXXXXX";
  const int descriptor = ::mkostemp(name.data(), O_CLOEXEC);
  if (descriptor >= 0) {
    ::unlink(name.c_str());
  }
  return descriptor;
}

}  // namespace snug::detail
