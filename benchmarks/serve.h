#pragma once
// A benchmark program offers cases by name and runs one when asked, so that script/bench can let programs of two
// languages take turns: a time is only ever compared with one taken a moment before or after. Protocol, line by line:
// the program prints "ready"; for each line "<case> <repeats>" on standard input it prints the seconds that so many
// calls took.
//
//   int main() { return snug::benchmarks::serve({{"adamw", [] { return prepared_step(); }}}); }

#include <chrono>
#include <functional>
#include <iostream>
#include <map>
#include <string>

namespace snug::benchmarks {

/// Makes what is timed. Called once, when the case is first asked for; the result is then called twice to warm up.
using Prepare = std::function<std::function<void()>()>;

/// `wait`: called before the clock is read, for a device that runs on its own.
inline int serve(const std::map<std::string, Prepare>& cases, const std::function<void()>& wait = [] {}) {
  std::map<std::string, std::function<void()>> prepared;
  std::cout << "ready" << std::endl;
  std::string name;
  int repeats = 0;
  while (std::cin >> name >> repeats) {
    if (!prepared.contains(name)) {
      if (!cases.contains(name)) {
        std::cerr << "there is no case '" << name << "'\n";
        return 2;
      }
      prepared[name] = cases.at(name)();
      prepared[name]();
      prepared[name]();
    }
    wait();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; ++i) {
      prepared[name]();
    }
    wait();
    std::cout << std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() << std::endl;
  }
  return 0;
}

}  // namespace snug::benchmarks
