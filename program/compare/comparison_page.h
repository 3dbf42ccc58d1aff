#pragma once
// comparison_page: several experiments as one page that loads nothing, light and dark, legible without colour vision:
// of each the idea, the numbers that matter, what was found, and the figures with their data beside them.
//
//   std::string page = snug::cli::comparison_page({.title = "Side by side", .sections = {sin_cos, checkpointing}});

#include <string>
#include <vector>

#include "program/compare/exhibit.h"

namespace snug::cli {

/// A number in large print.
struct KeyNumber {
  std::string label;
  std::string value;  ///< what follows the first space is printed smaller: "31.6 %"
  std::string note = {};
};

struct Section {
  std::string name;  ///< of the experiment, as it is typed
  std::string title;
  std::string idea = {};  ///< what is compared, and why
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
