#pragma once
// SlowNotice: tells somebody at a terminal what is being done, where that takes more than two seconds.

#include <string>
#include <thread>

namespace snug::cli {

class SlowNotice {
 public:
  /// One line on standard error, if that is a terminal and the object still lives after two seconds. Elsewhere nothing
  /// is printed, so that the lines of a program in a script do not depend on the machine's speed.
  explicit SlowNotice(std::string text);

 private:
  std::jthread thread_;  // ends with it
};

}  // namespace snug::cli
