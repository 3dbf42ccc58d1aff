#pragma once
// PythonPeer: a Python program that runs cases when it is asked, so that it can take turns with one of ours.

#include <cstdint>
#include <string>
#include <vector>

#include <sys/types.h>

namespace snug::cli {

/// Speaks the protocol of benchmarks/serve.h: it says "ready"; asked for "CASE REPEATS", it answers with the seconds
/// that so many calls took.
class PythonPeer {
 public:
  /// Throws Error if the interpreter cannot be started, or the script ends before it is ready.
  PythonPeer(const std::string& interpreter, const std::string& script, const std::vector<std::string>& arguments);
  ~PythonPeer();
  PythonPeer(const PythonPeer&) = delete;
  PythonPeer& operator=(const PythonPeer&) = delete;

  /// Throws Error if the program has ended.
  double seconds(const std::string& name, int64_t repeats);

 private:
  std::string read_line();

  std::string interpreter_;
  pid_t process_ = -1;
  int to_ = -1, from_ = -1;
  std::string buffer_;
};

/// Its case "float32" or "bfloat16" is one epoch of sin-cos; the argument is the number of points.
std::string sin_cos_script();

}  // namespace snug::cli
