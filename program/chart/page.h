#pragma once
// The document around a page's content, and numbers in large print.

#include <string>
#include <string_view>

namespace snug::chart {

/// A whole document that loads nothing. document() escapes `title`, `subtitle` and `footer`; `main` is HTML.
std::string document(std::string_view title, std::string_view subtitle, std::string_view main, std::string_view footer);

/// A value with the value's unit, if any, in smaller letters. card() escapes all text.
std::string card(std::string_view label, const std::string& value, std::string_view note);

}  // namespace snug::chart
