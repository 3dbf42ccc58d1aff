#include "program/compare/ranks.h"

#include <array>
#include <cstdio>
#include <filesystem>
#include <memory>

#include <fmt/format.h>
#include <sys/wait.h>

#include "program/shell.h"
#include "snug/core.h"

namespace snug::cli {
namespace {

struct Close {
  void operator()(std::FILE* pipe) const { ::pclose(pipe); }
};

}  // namespace

std::vector<std::string> lines_of_ranks(std::string_view experiment, int ranks, const CompareFlags& flags,
                                        std::string_view begin, size_t count) {
  const std::string self = shell_quoted(std::filesystem::read_symlink("/proc/self/exe").string());
  // Ranks that share cores must not spin while they wait.
  const std::string command =
      fmt::format("OMP_WAIT_POLICY=passive {0} launch -n {1} -- {0} compare {2} --digits {3} --pairs {4}{5}", self,
                  ranks, experiment, shell_quoted(flags.digits), flags.turns(7), flags.quick ? " --quick" : "");
  std::unique_ptr<std::FILE, Close> output(::popen(command.c_str(), "r"));
  if (!output) {
    throw Error("compare: cannot start the ranks");
  }
  std::vector<std::string> lines;
  std::array<char, 512> buffer = {};
  while (std::fgets(buffer.data(), buffer.size(), output.get()) != nullptr) {
    const std::string_view line = buffer.data();
    if (const size_t at = line.find(begin); at != std::string_view::npos) {  // after the rank that launch prints first
      lines.emplace_back(line.substr(at + begin.size()));
    }
  }
  if (const int status = ::pclose(output.release()); status != 0) {
    throw Error(fmt::format("compare: the {} ranks of {} ended with status {}; what they said stands above", ranks,
                            experiment, WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status)));
  }
  if (lines.size() != count) {
    throw Error(fmt::format("compare: {} ranks gave {} of {} results", ranks, lines.size(), count));
  }
  return lines;
}

}  // namespace snug::cli
