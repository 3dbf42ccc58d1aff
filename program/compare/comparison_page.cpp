#include "program/compare/comparison_page.h"

#include <fmt/format.h>

#include "program/chart/figure.h"
#include "program/chart/page.h"
#include "program/chart/tag.h"
#include "program/chart/text.h"
#include "program/compare/exhibit_figures.h"

namespace snug::cli {
namespace {

using chart::escape_html;
using chart::tag;

std::string section_html(const Section& section) {
  std::string html = "\n" + tag("h2", {}, escape_html(section.title)) + "\n" +
                     tag("p", {{"class", "idea"}}, escape_html(section.idea)) + "\n";
  std::string cards, findings, figures;
  for (const KeyNumber& number : section.numbers) {
    cards += chart::card(number.label, number.value, number.note);
  }
  for (const std::string& finding : section.findings) {
    findings += tag("li", {}, escape_html(finding)) + "\n";
  }
  for (const Exhibit& exhibit : section.exhibits) {
    figures += exhibit_figure(exhibit);
  }
  html += cards.empty() ? "" : tag("div", {{"class", "cards"}}, "\n" + cards) + "\n";
  html += findings.empty() ? "" : tag("ul", {{"class", "findings"}}, "\n" + findings) + "\n";
  html += tag("div", {{"class", "charts"}}, "\n" + figures) + "\n";
  return tag("section", {{"id", section.name}}, html) + "\n";
}

std::string markdown_row(const std::vector<std::string>& cells) {
  std::string line = "|";
  for (const std::string& cell : cells) {
    line += " " + cell + " |";
  }
  return line + "\n";
}

std::string markdown_table(const Table& table) {
  std::string text = markdown_row(table.header) + "|";
  for (size_t i = 0; i < table.header.size(); ++i) {
    text += "---|";
  }
  text += "\n";
  for (const auto& row : table.rows) {
    text += markdown_row(row);
  }
  return text;
}

Table as_table(const Bars& bars) {
  Table table{.header = {""}};
  table.header.insert(table.header.end(), bars.parts.begin(), bars.parts.end());
  table.header.emplace_back("");
  for (const Bar& bar : bars.bars) {
    std::vector<std::string> row{bar.name};
    for (const double value : bar.values) {
      row.push_back(chart::value_text(value, bars.quantity));
    }
    row.push_back(bar.note);
    table.rows.push_back(row);
  }
  return table;
}

std::string markdown_of(const Exhibit& exhibit) {
  std::string table;
  if (const auto* bars = std::get_if<Bars>(&exhibit.content)) {
    table = markdown_table(as_table(*bars));
  } else if (const auto* rows = std::get_if<Table>(&exhibit.content)) {
    table = markdown_table(*rows);
  } else {
    return "";
  }
  return fmt::format("\n**{}**{}{}. {}\n\n{}", exhibit.title, exhibit.caption.empty() ? "" : ", ", exhibit.caption,
                     exhibit.made, table);
}

}  // namespace

std::string comparison_page(const ComparisonPage& page) {
  std::string main;
  if (page.sections.size() > 1) {
    std::string links;
    for (const Section& section : page.sections) {
      links += tag("a", {{"href", "#" + section.name}}, escape_html(section.title)) + "\n";
    }
    main += tag("nav", {}, "\n" + links) + "\n";
  }
  for (const Section& section : page.sections) {
    main += section_html(section);
  }
  return chart::document(
      page.title, page.subtitle, main,
      "Written by snug compare. Bytes are counted by the allocator, in powers of 1024. Times depend on the machine and "
      "on what else runs on it; ratios are of runs that took turns.");
}

std::string comparison_markdown(const ComparisonPage& page) {
  std::string text = fmt::format("# {}\n\n{}\n", page.title, page.subtitle);
  for (const Section& section : page.sections) {
    text += fmt::format("\n## {}\n\n{}\n\n", section.title, section.idea);
    for (const KeyNumber& number : section.numbers) {
      text += fmt::format("- {}: {}{}{}\n", number.label, number.value, number.note.empty() ? "" : ", ", number.note);
    }
    for (const std::string& finding : section.findings) {
      text += fmt::format("- {}\n", finding);
    }
    for (const Exhibit& exhibit : section.exhibits) {
      text += markdown_of(exhibit);
    }
  }
  return text;
}

}  // namespace snug::cli
