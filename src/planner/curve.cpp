#include "src/planner/curve.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "snug/core.h"

namespace snug::plan {

const Solution* Curve::within(int64_t budget) const {
  const auto first =
      std::find_if(points.begin(), points.end(), [&](const Solution& p) { return p.peak_bytes <= budget; });
  return first == points.end() ? nullptr : &*first;
}

std::string Curve::table() const {
  std::string text =
      fmt::format("{:>12} {:>10} {:>12} {:>8} {:>12}\n", "peak", "of plain", "step", "slower", "above best");
  for (const Solution& point : points) {
    text +=
        fmt::format("{:>12} {:>8.1f} % {:>9.3f} ms {:>+6.1f} % {:>10.1f} %\n", Bytes(point.peak_bytes).str(),
                    100.0 * static_cast<double>(point.peak_bytes) /
                        static_cast<double>(std::max<int64_t>(1, point.plain_peak_bytes)),
                    1e3 * point.seconds,
                    point.plain_seconds > 0 ? 100 * (point.seconds / point.plain_seconds - 1) : 0.0, 100 * point.gap());
  }
  return text;
}

Curve curve(const Simulator& simulator, CurveOptions options) {
  if (options.points < 2) {
    throw ConfigError(fmt::format("curve: points is {}; give at least 2", options.points));
  }
  Solver solver(simulator, options.solver);
  const int64_t plain = simulator.run(keep_all(simulator.profile())).peak_bytes;
  const int64_t least = solver.smallest().peak_bytes;
  std::vector<int64_t> budgets;
  for (int i = 0; i < options.points; ++i) {
    budgets.push_back(plain - (plain - least) * i / (options.points - 1));
  }
  Curve curve;
  for (Answer& answer : solver.curve(budgets)) {
    Solution& plan = std::get<Solution>(answer);
    if (curve.points.empty() || plan.peak_bytes < curve.points.back().peak_bytes) {
      curve.points.push_back(std::move(plan));
    }
  }
  return curve;
}

}  // namespace snug::plan
