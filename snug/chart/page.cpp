#include "snug/chart/page.h"

#include <fmt/format.h>

#include "snug/chart/style.h"
#include "snug/chart/text.h"

namespace snug::chart {
namespace {

// The browser itself is told to load nothing.
constexpr std::string_view kPolicy =
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:";

}  // namespace

std::string document(std::string_view title, std::string_view subtitle, std::string_view main,
                     std::string_view footer) {
  std::string page = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"{}\">\n<link rel=\"icon\" href=\"data:,\">\n"
      "<title>{}</title>\n<style>{}{}</style>\n</head>\n",
      kPolicy, escape_html(title), kPageStyle, kSmallScreenStyle);
  page += fmt::format("<body>\n<header><div class=\"brand\">{}snug</div>\n<h1>{}</h1>\n<p>{}</p></header>\n<main>\n",
                      kPageMark, escape_html(title), escape_html(subtitle));
  page += main;
  return page + fmt::format("</main>\n<footer>{}</footer>\n<script>{}</script>\n</body>\n</html>\n",
                            escape_html(footer), kPageScript);
}

std::string card(std::string_view label, const std::string& value, std::string_view note) {
  const size_t space = value.find(' ');
  const std::string unit = space == std::string::npos ? "" : "<small>" + escape_html(value.substr(space)) + "</small>";
  return fmt::format(
      "<div class=\"card\"><div class=\"label\">{}</div><div class=\"value\">{}{}</div><div "
      "class=\"note\">{}</div></div>\n",
      escape_html(label), escape_html(value.substr(0, space)), unit, escape_html(note));
}

}  // namespace snug::chart
