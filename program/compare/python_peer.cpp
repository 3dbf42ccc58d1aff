#include "program/compare/python_peer.h"

#include <array>
#include <csignal>
#include <cstdlib>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include "program/compare/sin_cos_script.h"  // made by program/CMakeLists.txt of benchmarks/peers/sin_cos.py
#include "snug/core.h"

namespace snug::cli {

PythonPeer::PythonPeer(const std::string& interpreter, const std::string& script,
                       const std::vector<std::string>& arguments)
    : interpreter_(interpreter) {
  std::array<int, 2> to = {}, from = {};
  if (::pipe2(to.data(), O_CLOEXEC) != 0 || ::pipe2(from.data(), O_CLOEXEC) != 0) {
    throw Error("compare: cannot make a pipe");
  }
  std::vector<std::string> words{interpreter, "-c", script};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> pointers;
  for (std::string& word : words) {
    pointers.push_back(word.data());
  }
  pointers.push_back(nullptr);
  std::signal(SIGPIPE, SIG_IGN);  // a write to an ended program must be an error, not the end of this program
  process_ = ::fork();
  if (process_ == 0) {
    ::dup2(to[0], STDIN_FILENO);
    ::dup2(from[1], STDOUT_FILENO);
    ::setenv("OMP_WAIT_POLICY", "passive", 1);  // a program that waits for a turn leaves the cores to the other program
    ::execvp(pointers.front(), pointers.data());
    ::_exit(127);
  }
  ::close(to[0]);
  ::close(from[1]);
  to_ = to[1];
  from_ = from[0];
  read_line();
}

PythonPeer::~PythonPeer() {
  ::close(to_);
  ::close(from_);
  ::waitpid(process_, nullptr, 0);
}

double PythonPeer::seconds(const std::string& name, int64_t repeats) {
  const std::string order = fmt::format("{} {}\n", name, repeats);
  if (::write(to_, order.data(), order.size()) != static_cast<ssize_t>(order.size())) {
    throw Error(fmt::format("compare: {} has ended", interpreter_));
  }
  return std::strtod(read_line().c_str(), nullptr);
}

std::string PythonPeer::read_line() {
  for (;;) {
    if (const size_t end = buffer_.find('\n'); end != std::string::npos) {
      const std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return line;
    }
    std::array<char, 256> block = {};
    const ssize_t count = ::read(from_, block.data(), block.size());
    if (count <= 0) {
      throw Error(fmt::format("compare: '{}' ended before it answered; does --python name an interpreter with torch?",
                              interpreter_));
    }
    buffer_.append(block.data(), static_cast<size_t>(count));
  }
}

std::string sin_cos_script() { return kSinCosScript; }

}  // namespace snug::cli
