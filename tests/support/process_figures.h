#pragma once
// What Linux says of this process: bytes in memory, open files, threads.

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

namespace snug::testing {

struct ProcessFigures {
  int64_t resident = 0;       // bytes: RssAnon and RssFile
  int64_t peak_resident = 0;  // since the start, or since forget_peak_resident()
  int64_t of_files = 0;       // of the resident ones: pages of programs, libraries and mapped files
  int64_t threads = 0;
  int64_t open_files = 0;
};

/// Throws std::runtime_error where there is no /proc.
inline ProcessFigures process_figures() {
  ProcessFigures figures;
  std::ifstream status("/proc/self/status");
  int64_t found = 0;
  for (std::string name; status >> name;) {
    const auto read = [&](int64_t& figure, int64_t unit) {
      status >> figure;
      figure *= unit;
      ++found;
    };
    if (name == "VmRSS:") {
      read(figures.resident, 1024);
    } else if (name == "VmHWM:") {
      read(figures.peak_resident, 1024);
    } else if (name == "RssFile:") {
      read(figures.of_files, 1024);
    } else if (name == "Threads:") {
      read(figures.threads, 1);
    }
    status.ignore(1 << 20, '\n');
  }
  if (found != 4) {
    throw std::runtime_error("/proc/self/status lacks VmRSS, VmHWM, RssFile or Threads");
  }
  // The iterator's own file is not one of them.
  figures.open_files = std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}) - 1;
  return figures;
}

/// From here on peak_resident is of what follows.
inline void forget_peak_resident() { std::ofstream("/proc/self/clear_refs") << "5" << std::flush; }

}  // namespace snug::testing
