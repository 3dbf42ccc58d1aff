#pragma once
// An exhibit as a figure of a page, with a line below on the origin and the file of the numbers; or as an image.

#include <string>

#include "program/chart/figure.h"
#include "program/compare/exhibit.h"

namespace snug::cli {

/// A Table has no image: the result is empty.
std::string exhibit_figure(const Exhibit& exhibit, chart::Medium medium = chart::Medium::Page);

}  // namespace snug::cli
