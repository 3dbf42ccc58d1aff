// snug report: the report page of a run, or a comparison of two runs as a table.

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "program/chart/median.h"
#include "program/command.h"
#include "program/run_folder.h"
#include "snug/core.h"

namespace snug::cli {
namespace {

struct ReportFlags {
  std::string run = "run";
  std::string against;
};

template <class F>
double largest(const RunHistory& run, F&& value) {
  double most = 0;
  for (const StepRecord& record : run.records) {
    most = std::max(most, static_cast<double>(value(record)));
  }
  return most;
}

double median_speed(const RunHistory& run) {
  std::vector<double> speeds;
  for (const StepRecord& record : run.records) {
    speeds.push_back(record.items_per_second);
  }
  return chart::median(std::move(speeds));
}

// The relative difference of b from a. Values without a ratio (NaN in one of them, something against nothing) differ
// without bound, not by 0.
double relative_difference(double a, double b) {
  if (a == b || (std::isnan(a) && std::isnan(b))) {
    return 0;
  }
  const double difference = std::abs(a - b) / std::abs(a);
  return std::isfinite(difference) ? difference : std::numeric_limits<double>::infinity();
}

std::string change(double from, double to) { return from > 0 ? fmt::format("{:+.1f} %", 100 * (to / from - 1)) : ""; }

void print_comparison(const ReportFlags& flags) {
  const RunHistory a = read_run(flags.run);
  const RunHistory b = read_run(flags.against);
  const size_t steps = std::min(a.records.size(), b.records.size());
  if (steps == 0) {
    throw ConfigError(fmt::format("report: '{}' and '{}' have no steps in common", flags.run, flags.against));
  }
  double difference = 0;
  for (size_t i = 0; i < steps; ++i) {
    difference = std::max(difference, relative_difference(a.records[i].loss, b.records[i].loss));
  }
  const auto row = [](const std::string& name, const std::string& left, const std::string& right,
                      const std::string& last) {
    fmt::print("{:<28} {:>16} {:>16} {:>10}\n", name, left, right, last);
  };
  const auto bytes_row = [&](const std::string& name, auto&& value) {
    const double left = largest(a, value);
    const double right = largest(b, value);
    row(name, Bytes(static_cast<int64_t>(left)).str(), Bytes(static_cast<int64_t>(right)).str(), change(left, right));
  };
  row("", flags.run, flags.against, "change");
  row(fmt::format("loss after {} steps", steps), fmt::format("{:.6f}", a.records[steps - 1].loss),
      fmt::format("{:.6f}", b.records[steps - 1].loss), "");
  bytes_row("peak of activations", [](const StepRecord& r) { return r.activation_peak_bytes; });
  bytes_row("peak of all tensors", [](const StepRecord& r) { return r.peak_bytes; });
  const double left = median_speed(a);
  const double right = median_speed(b);
  row(item_of(a) + "/s, median", fmt::format("{:.0f}", left), fmt::format("{:.0f}", right), change(left, right));
  fmt::print("largest relative difference of a step's loss: {:.2g}\n", difference);
}

void run_report(const ReportFlags& flags) {
  if (!flags.against.empty()) {
    print_comparison(flags);
    return;
  }
  write_report(flags.run, /*sample=*/{});
  fmt::print("{}\n", report_path(flags.run).string());
}

}  // namespace

void add_report(CLI::App& app) {
  CLI::App* command = app.add_subcommand("report", "Write the report page of a run, or compare two runs");
  const auto flags = std::make_shared<ReportFlags>();
  add_run(*command, flags->run);
  command->add_option("--against", flags->against, "Another run: print a table of both instead")->type_name("DIR");
  command->callback([flags] { run_report(*flags); });
}

}  // namespace snug::cli
