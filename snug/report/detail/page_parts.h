#pragma once
// What the pages of report have in common: the document around them, and numbers in large print. Internal to report.

#include <string>
#include <string_view>

namespace snug::detail {

/// A whole document that loads nothing. `title` and `subtitle` are escaped here; `main` is HTML.
std::string document(std::string_view title, std::string_view subtitle, std::string_view main, std::string_view footer);

/// A value with its unit, if there is one, in smaller letters.
std::string card(std::string_view label, const std::string& value, std::string_view note);

}  // namespace snug::detail
