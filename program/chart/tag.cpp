#include "program/chart/tag.h"

#include <fmt/format.h>

#include "program/chart/text.h"

namespace snug::chart {
namespace {

std::string opened(std::string_view name, Attributes attributes) {
  std::string markup = "<" + std::string(name);
  for (const Attribute& attribute : attributes) {
    markup += attribute.markup;
  }
  return markup;
}

}  // namespace

std::string short_number(double value) {
  std::string text = fmt::format("{:.2f}", value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.ends_with('.')) {
    text.pop_back();
  }
  return text == "-0" ? "0" : text;
}

Attribute::Attribute(std::string_view name, std::string_view value)
    : markup(value.empty() ? "" : fmt::format(" {}=\"{}\"", name, escape_html(value))) {}

std::string tag(std::string_view name, Attributes attributes) { return opened(name, attributes) + "/>"; }

std::string tag(std::string_view name, Attributes attributes, std::string_view content) {
  return fmt::format("{}>{}</{}>", opened(name, attributes), content, name);
}

std::string moved(double x, double y, std::string_view svg) {
  const std::string place = fmt::format("translate({} {})", short_number(x), short_number(y));
  return tag("g", {{"transform", place}}, svg) + "\n";
}

}  // namespace snug::chart
