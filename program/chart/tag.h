#pragma once
// tag: an element of HTML or SVG, instead of format strings with markup.
//
//   tag("rect", {{"class", "area"}, {"x", 3.0}, {"width", 12.5}})     // <rect class="area" x="3" width="12.5"/>
//   tag("td", {}, escape_html(name))                                   // <td>a &lt; b</td>

#include <concepts>
#include <initializer_list>
#include <string>
#include <string_view>

namespace snug::chart {

/// At most two decimals, and no zeros at the end: "12.5", "300".
std::string short_number(double value);

/// One attribute of an element. The constructor escapes the value. An attribute with an empty text is left out.
struct Attribute {
  Attribute(std::string_view name, std::string_view value);
  template <class Number>
    requires std::integral<Number> || std::floating_point<Number>
  Attribute(std::string_view name, Number value) : Attribute(name, short_number(static_cast<double>(value))) {}

  std::string markup;  ///< ` name="value"`
};

using Attributes = std::initializer_list<Attribute>;

/// `<name attributes/>`, allowed in HTML only for elements of SVG.
std::string tag(std::string_view name, Attributes attributes);

/// `<name attributes>content</name>`; `content` is markup.
std::string tag(std::string_view name, Attributes attributes, std::string_view content);

/// SVG moved to the right and down.
std::string moved(double x, double y, std::string_view svg);

}  // namespace snug::chart
