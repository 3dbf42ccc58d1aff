#include "program/chart/page.h"

#include <fmt/format.h>

#include "program/chart/files.h"
#include "program/chart/tag.h"
#include "program/chart/text.h"

namespace snug::chart {
namespace {

// The browser itself is told to load nothing.
constexpr std::string_view kPolicy =
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:";

constexpr std::string_view kDocument = R"(<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}{figures}</style>
</head>
<body>
<header><div class="brand">{mark}snug</div>
<h1>{title}</h1>
<p>{subtitle}</p></header>
<main>
{main}</main>
<footer>{footer}</footer>
<script>{script}</script>
</body>
</html>
)";

}  // namespace

std::string document(std::string_view title, std::string_view subtitle, std::string_view main,
                     std::string_view footer) {
  return fmt::format(kDocument, fmt::arg("policy", kPolicy), fmt::arg("title", escape_html(title)),
                     fmt::arg("style", kPageStyle), fmt::arg("figures", kFigureStyle), fmt::arg("mark", kPageMark),
                     fmt::arg("subtitle", escape_html(subtitle)), fmt::arg("main", main),
                     fmt::arg("footer", escape_html(footer)), fmt::arg("script", kPageScript));
}

std::string card(std::string_view label, const std::string& value, std::string_view note) {
  const size_t space = value.find(' ');
  const std::string unit = space == std::string::npos ? "" : tag("small", {}, escape_html(value.substr(space)));
  return tag("div", {{"class", "card"}},
             tag("div", {{"class", "label"}}, escape_html(label)) +
                 tag("div", {{"class", "value"}}, escape_html(value.substr(0, space)) + unit) +
                 tag("div", {{"class", "note"}}, escape_html(note))) +
         "\n";
}

}  // namespace snug::chart
