#pragma once
// The files of this folder that go into every page or image, embedded by CMake.

#include <string_view>

namespace snug::chart {

extern const std::string_view kPageStyle;    ///< style.css: how pages look
extern const std::string_view kFigureStyle;  ///< figure.css: how figures look, in pages and in images
extern const std::string_view kPageScript;   ///< page.js: values under the pointer
extern const std::string_view kPageMark;     ///< mark.svg

}  // namespace snug::chart
