#pragma once
// Exhibit: a result for people to look at, as numbers: curves or points over an axis, stacked bars, a table, or the
// schedule of forward and backward. Each exhibit becomes a figure of a page (comparison_page.h), an image, and a file
// of CSV with the drawn numbers.
//
//   const snug::cli::Exhibit exhibit{
//       .file = "losses",
//       .title = "Loss",
//       .made = "1,000 epochs, seed 1",
//       .content = snug::cli::Plot{.x = {.title = "epoch"}, .curves = {{.name = "FP32", .x = epochs, .y = losses}}}};
//   std::string data = snug::cli::exhibit_csv(exhibit);

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "program/chart/bars.h"
#include "program/chart/line.h"

namespace snug::cli {

using chart::Bar;
using chart::Drawn;
using chart::Quantity;

struct PlotAxis {
  std::string title;
  Quantity quantity = Quantity::Number;
  bool from_zero = false;  ///< show zero, too
  double log_base = 0;     ///< 2 or 10: logarithmic, if all values are positive
};

struct Curve {
  std::string name;
  std::vector<double> x;  ///< ascending for lines
  std::vector<double> y;  ///< one for each x; a line has a gap at values that are not finite
  Drawn drawn = Drawn::Line;
  std::vector<std::string> labels = {};  ///< one label for each point, or no labels
};

struct Plot {
  PlotAxis x = {};
  PlotAxis y = {};
  std::vector<Curve> curves = {};
  bool wide = true;  ///< over the full width of the page
};

/// Amounts that add up, one bar each, all from the same zero.
struct Bars {
  Quantity quantity = Quantity::Number;
  std::vector<std::string> parts =
      {};  ///< from the left; "parameters", "activations" ... get their colours of the report
  std::vector<Bar> bars = {};
};

struct Table {
  std::vector<std::string> header = {};
  std::vector<std::vector<std::string>> rows = {};  ///< each as long as the header
};

/// The work of a chain of blocks, one block after the other, in a forward and backward pass.
struct BlockRun {
  enum class What {
    Forward,  ///< for the first time
    Again,    ///< forward once more, because the result was dropped
    Backward,
  };
  What what;
  int64_t block;  ///< from 1
  /// Not for Backward: the index, among the runs, of the first run with the result no longer in memory.
  int64_t kept_until = 0;
  bool is_kept = false;  ///< not for Backward: the result was in memory at the end of the forward pass
};

/// The same chain, run in several ways.
struct Schedule {
  struct Way {
    std::string name;
    std::vector<BlockRun> runs;  ///< in the order of time

    int64_t runs_again() const;
    /// The largest number of blocks' results in memory at once.
    int64_t most_kept() const;
  };

  int64_t blocks = 0;
  std::vector<Way> ways;
};

struct Exhibit {
  std::string file;  ///< the name of the data file, without .csv; letters, digits and dashes
  std::string title;
  std::string caption = {};  ///< behind the title: content and unit
  std::string made = {};     ///< the origin of the numbers, in a line
  std::variant<Plot, Bars, Table, Schedule> content;
};

/// The drawn numbers, with a header line; doubles read back bit for bit. RFC 4180, except for line feeds as line ends.
/// Columns of curves: curve, x, y, label. Columns of bars: one for each part. Columns of a schedule: way, time (the
/// index among the runs), run, block, kept until, kept by forward (1 or 0). The last column of all is `device`, the
/// device of the measurement.
std::string exhibit_csv(const Exhibit& exhibit, const std::string& device);

/// The figure as a complete SVG, for light and dark. Empty for a Table: comparison_markdown has the table's text.
std::string exhibit_svg(const Exhibit& exhibit);

}  // namespace snug::cli
