#pragma once
// LabelPlacer: puts labels, one after the other, at positions in a plot where labels cover neither points nor each
// other.

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "program/chart/figure.h"

namespace snug::chart {

class LabelPlacer {
 public:
  /// For a plot of this width and height in pixels.
  explicit LabelPlacer(std::pair<double, double> size) : width_(size.first), height_(size.second) {}

  /// A point, in [0, 1] of either axis, that no label may cover.
  void keep_free(double x, double y);

  /// The label at the first free position of a few positions around the label's point; empty if no position is free.
  std::optional<Label> place(double x, double y, const std::string& text, const std::string& look);

 private:
  // In pixels from the lower left corner.
  struct Box {
    double left, bottom, right, top;

    bool meets(const Box& other) const {
      return left < other.right && other.left < right && bottom < other.top && other.bottom < top;
    }
  };

  bool is_free(const Box& box) const;

  double width_, height_;
  std::vector<Box> taken_;
};

}  // namespace snug::chart
