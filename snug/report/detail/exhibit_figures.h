#pragma once
// An exhibit as an HTML figure, with a line below it on how it was made and where its numbers are. Internal to report.

#include <string>

#include "snug/report/exhibit.h"

namespace snug::detail {

std::string exhibit_figure(const Exhibit& exhibit);

/// "made" and a link to FILE.csv beside the page.
std::string figure_foot(const Exhibit& exhibit);

std::string plot_figure(const Exhibit& exhibit, const Plot& plot);

}  // namespace snug::detail
