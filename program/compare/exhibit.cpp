#include "program/compare/exhibit.h"

#include <algorithm>

#include <fmt/format.h>

#include "program/compare/exhibit_figures.h"

namespace snug::cli {
namespace {

std::string in_quotes(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) {
    return text;
  }
  std::string result = "\"";
  for (const char c : text) {
    result.append(c == '"' ? 2 : 1, c);
  }
  return result + '"';
}

using Rows = std::vector<std::vector<std::string>>;

std::string number(double value) { return fmt::format("{}", value); }

Rows rows_of(const Plot& plot) {
  const auto title = [](const PlotAxis& axis, const char* otherwise) {
    return axis.title.empty() ? std::string(otherwise) : axis.title;
  };
  Rows rows{{"curve", title(plot.x, "x"), title(plot.y, "y"), "label"}};
  for (const Curve& curve : plot.curves) {
    for (size_t i = 0; i < curve.x.size(); ++i) {
      rows.push_back({curve.name, number(curve.x[i]), number(curve.y[i]), curve.labels.empty() ? "" : curve.labels[i]});
    }
  }
  return rows;
}

Rows rows_of(const Bars& bars) {
  std::vector<std::string> header{"bar"};
  header.insert(header.end(), bars.parts.begin(), bars.parts.end());
  header.emplace_back("note");
  Rows rows{header};
  for (const Bar& bar : bars.bars) {
    std::vector<std::string> cells{bar.name};
    for (const double value : bar.values) {
      cells.push_back(number(value));
    }
    cells.push_back(bar.note);
    rows.push_back(cells);
  }
  return rows;
}

Rows rows_of(const Table& table) {
  Rows rows{table.header};
  rows.insert(rows.end(), table.rows.begin(), table.rows.end());
  return rows;
}

const char* name_of(BlockRun::What what) {
  return what == BlockRun::What::Forward ? "forward" : what == BlockRun::What::Again ? "again" : "backward";
}

Rows rows_of(const Schedule& schedule) {
  Rows rows{{"way", "time", "run", "block", "kept until", "kept by forward"}};
  for (const Schedule::Way& way : schedule.ways) {
    for (size_t i = 0; i < way.runs.size(); ++i) {
      const BlockRun& run = way.runs[i];
      const bool has_result = run.what != BlockRun::What::Backward;
      rows.push_back({way.name, fmt::format("{}", i), name_of(run.what), fmt::format("{}", run.block),
                      has_result ? fmt::format("{}", run.kept_until) : "",
                      has_result ? fmt::format("{:d}", run.is_kept) : ""});
    }
  }
  return rows;
}

}  // namespace

int64_t Schedule::Way::runs_again() const {
  return std::count_if(runs.begin(), runs.end(), [](const BlockRun& run) { return run.what == BlockRun::What::Again; });
}

int64_t Schedule::Way::most_kept() const {
  int64_t most = 0;
  for (size_t now = 0; now < runs.size(); ++now) {
    const auto end = runs.begin() + static_cast<std::ptrdiff_t>(now) + 1;
    most = std::max<int64_t>(most, std::count_if(runs.begin(), end, [&](const BlockRun& run) {
                               return run.kept_until > static_cast<int64_t>(now);
                             }));
  }
  return most;
}

std::string exhibit_csv(const Exhibit& exhibit, const std::string& device) {
  std::string text, last = "device";
  for (const auto& row : std::visit([](const auto& content) { return rows_of(content); }, exhibit.content)) {
    for (const std::string& cell : row) {
      text += in_quotes(cell) + ',';
    }
    text += in_quotes(last) + '\n';
    last = device;
  }
  return text;
}

std::string exhibit_svg(const Exhibit& exhibit) { return exhibit_figure(exhibit, chart::Medium::Image); }

}  // namespace snug::cli
