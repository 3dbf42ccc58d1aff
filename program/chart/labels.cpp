#include "program/chart/labels.h"

#include <algorithm>
#include <array>

namespace snug::chart {

void LabelPlacer::keep_free(double x, double y) {
  taken_.push_back({x * width_ - 5, y * height_ - 5, x * width_ + 5, y * height_ + 5});
}

std::optional<Label> LabelPlacer::place(double x, double y, const std::string& text, const std::string& look) {
  struct Place {
    double right, up, before;
  };
  constexpr std::array<Place, 8> kPlaces{
      {{9, 0, 0}, {-9, 0, 1}, {0, 13, 0.5}, {0, -13, 0.5}, {7, 12, 0}, {7, -12, 0}, {-7, 12, 1}, {-7, -12, 1}}};
  const double length = 6.4 * static_cast<double>(text.size());
  for (const auto& [right, up, before] : kPlaces) {
    const double left = x * width_ + right - before * length, middle = y * height_ + up;
    const Box box{left, middle - 7, left + length, middle + 7};
    if (is_free(box)) {
      taken_.push_back(box);
      return Label{.x = x, .y = y, .right = right, .up = up, .before = before, .look = "tag " + look, .text = text};
    }
  }
  return std::nullopt;
}

bool LabelPlacer::is_free(const Box& box) const {
  const bool is_inside = box.left > 0 && box.right < width_ + 20 && box.bottom > 0 && box.top < height_ + 10;
  return is_inside && std::none_of(taken_.begin(), taken_.end(), [&](const Box& other) { return box.meets(other); });
}

}  // namespace snug::chart
