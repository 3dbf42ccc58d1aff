#include "snug/report/exhibit.h"

#include <fmt/format.h>

namespace snug {
namespace {

std::string quoted(const std::string& text) {
  if (text.find_first_of(",\"\n\r") == std::string::npos) {
    return text;
  }
  std::string result = "\"";
  for (const char c : text) {
    result.append(c == '"' ? 2 : 1, c);
  }
  return result + '"';
}

std::string line(const std::vector<std::string>& cells) {
  std::string text;
  for (size_t i = 0; i < cells.size(); ++i) {
    text += (i == 0 ? "" : ",") + quoted(cells[i]);
  }
  return text + '\n';
}

std::string number(double value) { return fmt::format("{}", value); }

std::string csv(const Plot& plot) {
  const auto title = [](const PlotAxis& axis, const char* otherwise) {
    return axis.title.empty() ? std::string(otherwise) : axis.title;
  };
  std::string text = line({"curve", title(plot.x, "x"), title(plot.y, "y"), "label"});
  for (const Curve& curve : plot.curves) {
    for (size_t i = 0; i < curve.x.size(); ++i) {
      text += line({curve.name, number(curve.x[i]), number(curve.y[i]), curve.labels.empty() ? "" : curve.labels[i]});
    }
  }
  return text;
}

std::string csv(const Bars& bars) {
  std::vector<std::string> header{"bar"};
  header.insert(header.end(), bars.parts.begin(), bars.parts.end());
  header.emplace_back("note");
  std::string text = line(header);
  for (const Bar& bar : bars.bars) {
    std::vector<std::string> cells{bar.name};
    for (const double value : bar.values) {
      cells.push_back(number(value));
    }
    cells.push_back(bar.note);
    text += line(cells);
  }
  return text;
}

std::string csv(const Table& table) {
  std::string text = line(table.header);
  for (const auto& row : table.rows) {
    text += line(row);
  }
  return text;
}

}  // namespace

std::string exhibit_csv(const Exhibit& exhibit) {
  return std::visit([](const auto& content) { return csv(content); }, exhibit.content);
}

}  // namespace snug
