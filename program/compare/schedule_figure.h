#pragma once
// A recorded schedule of computation and communication as a figure.

#include <string>

#include "program/chart/figure.h"
#include "program/compare/exhibit.h"

namespace snug::cli {

std::string schedule_figure(const Exhibit& exhibit, const Schedule& schedule, chart::Medium medium);

}  // namespace snug::cli
