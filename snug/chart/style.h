#pragma once
// The look of pages: its style sheet, the few lines of script that show values under the pointer, and its
// mark.

#include <string_view>

namespace snug::chart {

extern const std::string_view kPageStyle;
extern const std::string_view kSmallScreenStyle;
extern const std::string_view kPageScript;
extern const std::string_view kPageMark;

}  // namespace snug::chart
