#pragma once
// SlowNotice: tells a user at a terminal what the program is doing, if the work takes more than two seconds.

#include <string>
#include <thread>

namespace snug::cli {

class SlowNotice {
 public:
  /// Prints one line on standard error, if standard error is a terminal and the object still lives after two seconds.
  /// Otherwise prints nothing, so that the lines of a program in a script do not depend on the machine's speed.
  explicit SlowNotice(std::string text);

 private:
  std::jthread thread_;  // ends with the object
};

}  // namespace snug::cli
