#pragma once
// PythonPeer: a Python program that runs cases on request, so that the Python program can take turns with a snug
// program.

#include <cstdint>
#include <string>
#include <vector>

#include <sys/types.h>

namespace snug::cli {

/// Speaks the protocol of benchmarks/serve.h. The program says "ready". On the request "CASE REPEATS", the program
/// answers with the seconds of REPEATS calls.
class PythonPeer {
 public:
  /// Throws Error if the interpreter cannot be started, or the script ends before saying "ready".
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

/// A script with the cases "float32" and "bfloat16", each one epoch of sin-cos; the argument is the number of points.
std::string sin_cos_script();

}  // namespace snug::cli
