// The python experiment: a drawing of the ratios that benchmarks/run.py measured against Python PyTorch and LibTorch's
// own C++.

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "program/compare/experiment.h"
#include "snug/core.h"
#include "src/core/file_system.h"

namespace snug::cli {
namespace {

// A line of run.py's table: | what | median | lowest to highest | target |
struct Claim {
  std::string what, spread, target;
  double median = 0;

  bool has_target() const { return !target.empty(); }
  bool is_at_most() const { return target.find("at most") == 0; }
  bool is_met() const {
    const double limit = std::strtod(target.c_str() + target.find_last_of(' '), nullptr);
    return is_at_most() ? median <= limit : median >= limit;
  }
};

std::string trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(' '), end = text.find_last_not_of(' ');
  return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

std::vector<Claim> claims_of(const std::string& markdown) {
  std::vector<Claim> claims;
  std::istringstream lines(markdown);
  for (std::string line; std::getline(lines, line);) {
    std::vector<std::string> cells;
    std::istringstream row(line);
    for (std::string cell; std::getline(row, cell, '|');) {
      cells.push_back(trimmed(cell));
    }
    char* end = nullptr;
    const double median = cells.size() >= 4 ? std::strtod(cells[2].c_str(), &end) : 0;
    if (end != nullptr && end != cells[2].c_str() && *end == '\0' && cells[3].find(" to ") != std::string::npos) {
      claims.push_back(
          {.what = cells[1], .spread = cells[3], .target = cells.size() > 4 ? cells[4] : "", .median = median});
    }
  }
  return claims;
}

}  // namespace

Section compare_python(const CompareFlags& flags) {
  const std::vector<Claim> claims = claims_of(detail::FileSystem::real().read_file(flags.results));
  if (claims.empty()) {
    throw ConfigError(
        fmt::format("compare: '{}' holds no ratios; give a table that benchmarks/run.py wrote", flags.results));
  }
  Section section{.name = "python",
                  .title = "Against Python, and against LibTorch's own C++",
                  .idea =
                      "The same work in two programs that take turns, each at its best settings. The figure has what "
                      "is asked to be large, the table also what memory and planning cost."};
  Bars bars{.parts = {"ratio of times"}};
  Table table{
      .header = {"ratio of times, unless another unit is named", "median", "lowest to highest", "target", "met"}};
  int64_t with_target = 0, met = 0;
  for (const Claim& claim : claims) {
    const char* verdict = !claim.has_target() ? "" : claim.is_met() ? "yes" : "no";
    with_target += claim.has_target() ? 1 : 0;
    met += claim.has_target() && claim.is_met() ? 1 : 0;
    if (claim.has_target() && !claim.is_at_most()) {
      bars.bars.push_back({claim.what, {claim.median}, claim.spread});
    }
    table.rows.push_back({claim.what, fmt::format("{:.2f}", claim.median), claim.spread, claim.target, verdict});
  }
  section.numbers = {{"Targets met", fmt::format("{} of {}", met, with_target), "by the median"}};
  section.findings.push_back(fmt::format("{} of {} targets are met; the table says which are not.", met, with_target));
  const std::string made =
      "benchmarks/run.py: both programs run in turns, medians with the lowest and the highest ratio.";
  section.exhibits.push_back({.file = "python-ratios", .title = "Ratios of times", .made = made, .content = bars});
  section.exhibits.push_back({.file = "python-table", .title = "Targets", .made = made, .content = table});
  return section;
}

}  // namespace snug::cli
