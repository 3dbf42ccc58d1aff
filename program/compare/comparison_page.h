#pragma once
// comparison_page: several experiments as one page that loads nothing, light and dark, legible without colour vision.
// For each experiment the page has the idea, the numbers that matter, the findings, and the figures with their data.
//
//   std::string page = snug::cli::comparison_page({.title = "Side by side", .sections = {sin_cos, checkpointing}});

#include <string>
#include <vector>

#include "program/compare/exhibit.h"

namespace snug::cli {

/// A number in large print.
struct KeyNumber {
  std::string label;
  std::string value;  ///< the part after the first space is printed smaller: "31.6 %"
  std::string note = {};
};

struct Section {
  std::string name;  ///< the experiment's name on the command line
  std::string title;
  std::string idea = {};  ///< the things that are compared, and the reason
  std::vector<KeyNumber> numbers = {};
  std::vector<std::string> findings = {};  ///< sentences
  std::vector<Exhibit> exhibits = {};
};

struct ComparisonPage {
  std::string title;
  std::string subtitle = {};  ///< machine, versions, date
  std::vector<Section> sections = {};
};

/// The page, as UTF-8. All text is escaped.
std::string comparison_page(const ComparisonPage& page);

/// The same without curves, for a repository: numbers, findings, bars and tables as Markdown.
std::string comparison_markdown(const ComparisonPage& page);

}  // namespace snug::cli
