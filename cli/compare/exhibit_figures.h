#pragma once
// An exhibit as an HTML figure, with a line below it on how it was made and where its numbers are.

#include <string>
#include <string_view>

#include "cli/compare/exhibit.h"

namespace snug::cli {

/// Where a figure is shown: in a page, where the pointer brings up numbers and a link leads to them, or in an image.
enum class Medium { Page, Image };

std::string exhibit_figure(const Exhibit& exhibit, Medium medium = Medium::Page);

/// "made", and in a page a link to FILE.csv beside it.
std::string figure_foot(const Exhibit& exhibit, Medium medium);

std::string plot_figure(const Exhibit& exhibit, const Plot& plot, Medium medium);

/// The figure as an SVG that stands by itself: the page's HTML and style in a foreignObject, which browsers draw.
std::string figure_image(const Exhibit& exhibit);

/// One panel a way: which results the forward pass keeps, what backward has to run again, and both over time. An <svg> with `attribute` in it;
/// a file of its own needs the name space there, a page does not.
std::string schedule_svg(const Schedule& schedule, std::string_view title, std::string_view attribute);

}  // namespace snug::cli
