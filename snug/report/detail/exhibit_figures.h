#pragma once
// An exhibit as an HTML figure, with a line below it on how it was made and where its numbers are. Internal to report.

#include <string>
#include <string_view>

#include "snug/report/exhibit.h"

namespace snug::detail {

std::string exhibit_figure(const Exhibit& exhibit);

/// "made" and a link to FILE.csv beside the page.
std::string figure_foot(const Exhibit& exhibit);

std::string plot_figure(const Exhibit& exhibit, const Plot& plot);

/// One panel a way: which results the forward pass keeps, what backward has to run again, and both over time. An <svg> with `attribute` in it;
/// a file of its own needs the name space there, a page does not.
std::string schedule_svg(const Schedule& schedule, std::string_view title, std::string_view attribute);

}  // namespace snug::detail
