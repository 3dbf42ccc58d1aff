#pragma once
// How the report page looks: its style sheet, the few lines of script that show values under the pointer, and its
// mark. Internal to report.

#include <string_view>

namespace snug::detail {

extern const std::string_view kPageStyle;
extern const std::string_view kSmallScreenStyle;
extern const std::string_view kPageScript;
extern const std::string_view kPageMark;

}  // namespace snug::detail
