#include "program/chart/figure.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "program/chart/files.h"
#include "program/chart/tag.h"
#include "program/chart/text.h"

namespace snug::chart {
namespace {

constexpr double kPlotSide = 1000;                   // of a page's plot, in the plot's own units
constexpr double kLetter = 6.6;                      // the largest width of a letter in pixels
constexpr double kLine = 19;                         // the height of a line of text
constexpr double kMargin = 20;                       // of an image
constexpr double kImageLeft = 70, kImageRight = 24;  // of an image's plot

std::string key_drawing(const Key& key) {
  const auto path = [&](const char* kind, const char* d) {
    return tag("path", {{"class", key.look + " " + kind}, {"d", d}});
  };
  switch (key.shape) {
    case Shape::Line:
      return path("line", "M2 5h22");
    case Shape::Area:
      return path("area", "M6 0h14v10h-14z");
    case Shape::Mark:
      return path("marks", "M13 1v8");
    case Shape::Dot:
      break;
  }
  return path("dots", "M13 5h0") + path("holes", "M13 5h0");
}

std::string grid_path(const Frame& frame) {
  std::string path;
  for (const Tick& tick : frame.y.ticks) {
    path += fmt::format("M0 {:.1f}H{:.0f}", (1 - tick.place) * frame.height, frame.width);
  }
  return path;
}

std::string with_unit(const std::string& title, const Axis& axis) {
  return title.empty() ? axis.unit : axis.unit.empty() ? title : fmt::format("{} ({})", title, axis.unit);
}

// The positions and texts under the pointer, for the script.
std::string hover_json(const std::vector<Hover>& hover) {
  if (hover.empty()) {
    return "";
  }
  nlohmann::json places = nlohmann::json::array();
  nlohmann::json texts = nlohmann::json::array();
  for (const Hover& row : hover) {
    places.push_back(std::round(row.place * 1e4) / 1e4);
    texts.push_back(row.lines);
  }
  const nlohmann::json data{{"places", places}, {"texts", texts}};
  return data.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string page_ticks(const Axis& axis, std::string_view side, const char* from, std::string_view title) {
  std::string ticks;
  for (const Tick& tick : axis.ticks) {
    ticks += tag("span", {{"style", fmt::format("{}:{:.2f}%", from, tick.place * 100)}}, escape_html(tick.label));
  }
  return tag("div", {{"class", fmt::format("{}-ticks", side)}, {"data-title", title}, {"aria-hidden", "true"}}, ticks);
}

std::string page_label(const Label& label) {
  const std::string style =
      fmt::format("left:{:.2f}%;bottom:{:.2f}%;transform:translate({:.0f}%,50%) translate({:.0f}px,{:.0f}px)",
                  label.x * 100, label.y * 100, 0 - label.before * 100, label.right, 0 - label.up);
  return tag("span", {{"class", label.look}, {"style", style}, {"aria-hidden", "true"}}, escape_html(label.text));
}

std::string page_plot(const Heading& heading, const Drawing& drawing, const Frame& frame) {
  std::string html = page_ticks(frame.y, "y", "bottom", "") + "\n";
  if (const std::string title = with_unit(drawing.y_title, frame.y); !title.empty()) {
    html += tag("div", {{"class", drawing.y_title.empty() ? "unit" : "y-title"}}, escape_html(title)) + "\n";
  }
  html += tag("svg",
              {{"viewBox", fmt::format("0 0 {} {}", frame.width, frame.height)},
               {"preserveAspectRatio", "none"},
               {"role", "img"},
               {"aria-label", heading.description}},
              tag("path", {{"class", "grid"}, {"d", grid_path(frame)}}) + drawing.curves) +
          "\n";
  for (const Label& label : drawing.labels) {
    html += page_label(label);
  }
  html += page_ticks(frame.x, "x", "left", with_unit(drawing.x_title, frame.x)) + "\n";
  if (!drawing.hover.empty()) {
    html += tag("div", {{"class", "cursor"}, {"hidden", "hidden"}}, tag("div", {{"class", "tip"}}, "")) + "\n";
  }
  return tag("div", {{"class", "plot"}, {"data-hover", hover_json(drawing.hover)}}, "\n" + html) + "\n";
}

std::string image_label(const Label& label, const Frame& frame) {
  const char* anchor = label.before == 0 ? "" : label.before == 1 ? " end" : " middle";
  return svg_text(label.x * frame.width + label.right, (1 - label.y) * frame.height - label.up + 4, label.look + anchor,
                  label.text);
}

std::string image_plot(const Drawing& drawing, const Frame& frame) {
  std::string svg = tag("path", {{"class", "grid"}, {"d", grid_path(frame)}}) + "\n";
  for (const Tick& tick : frame.y.ticks) {
    svg += svg_text(-9, (1 - tick.place) * frame.height + 4, "soft end", tick.label);
  }
  for (const Tick& tick : frame.x.ticks) {
    svg += svg_text(tick.place * frame.width, frame.height + 18, "soft middle", tick.label);
  }
  svg += tag("path", {{"class", "axis"}, {"d", fmt::format("M0 {0:.0f}H{1:.0f}", frame.height, frame.width)}}) + "\n";
  svg += svg_text(-42, -14, "soft", with_unit(drawing.y_title, frame.y));
  svg += svg_text(frame.width / 2, frame.height + 36, "soft middle", with_unit(drawing.x_title, frame.x));
  svg += drawing.curves + "\n";
  for (const Label& label : drawing.labels) {
    svg += image_label(label, frame);
  }
  return svg;
}

// The words in lines of at most `width` pixels.
std::vector<std::string> lines_of(const std::string& text, double width) {
  std::vector<std::string> lines;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find(' ', at), text.size());
    const std::string word = text.substr(at, end - at);
    if (lines.empty() || text_width(lines.back() + " " + word) > width) {
      lines.push_back(word);
    } else {
      lines.back() += " " + word;
    }
    at = end + 1;
  }
  return lines;
}

// Text and drawings of an image, one below the other.
class Sheet {
 public:
  explicit Sheet(double width) : inside_(width - 2 * kMargin) {}

  void add_text(const std::string& text, std::string_view look) {
    for (const std::string& line : lines_of(text, inside_)) {
      y_ += kLine;
      svg_ += svg_text(kMargin, y_, look, line);
    }
  }

  void add_keys(const std::vector<Key>& keys) {
    double x = 0;
    y_ += keys.empty() ? 0 : kLine;
    for (const Key& key : keys) {
      const double width = 50 + text_width(key.text);
      if (x > 0 && x + width > inside_) {
        x = 0;
        y_ += kLine;
      }
      svg_ += moved(kMargin + x, y_ - 9, key_drawing(key)) + svg_text(kMargin + x + 32, y_, "soft", key.text);
      x += width;
    }
  }

  void add(std::string_view body, double height) {
    svg_ += moved(0, y_, body);
    y_ += height;
  }

  const std::string& svg() const { return svg_; }
  double height() const { return y_ + kMargin; }

 private:
  double inside_;
  double y_ = kMargin - 8;
  std::string svg_;
};

}  // namespace

std::string Frame::at(double x_value, double y_value) const {
  return fmt::format("{:.1f} {:.1f}", x.place(x_value) * width, (1 - y.place(y_value)) * height);
}

std::pair<double, double> plot_size(bool wide) { return wide ? std::pair(966.0, 300.0) : std::pair(446.0, 190.0); }

Frame make_frame(Axis x, Axis y, bool wide, Medium medium) {
  const auto [width, height] = medium == Medium::Page ? std::pair(kPlotSide, kPlotSide) : plot_size(wide);
  return {.x = std::move(x), .y = std::move(y), .width = width, .height = height};
}

Axis step_axis(Extent steps) {
  if (!steps.empty() && steps.low > 0 && steps.low <= 0.05 * steps.high) {
    steps.add(0);
  }
  return make_axis(steps, {.quantity = Quantity::Count, .tight = true, .about_ticks = 6});
}

int64_t hover_column(const Axis& x, double value) { return std::llround(x.place(value) * 150); }

std::string plot_figure(const Heading& heading, const Drawing& drawing, const Frame& frame, Medium medium) {
  if (medium == Medium::Page) {
    return page_figure(heading, page_plot(heading, drawing, frame));
  }
  constexpr double kAbove = 40, kBelow = 44;  // for the titles and ticks of the axes
  return image_figure(heading, moved(kImageLeft, kAbove, image_plot(drawing, frame)),
                      kImageLeft + frame.width + kImageRight, kAbove + frame.height + kBelow);
}

std::string page_figure(const Heading& heading, std::string_view body) {
  std::string caption =
      tag("h3", {}, escape_html(heading.title)) + tag("span", {{"class", "caption"}}, escape_html(heading.caption));
  std::string legend;
  for (const Key& key : heading.keys) {
    const std::string drawn = tag(
        "svg", {{"viewBox", "0 0 26 10"}, {"width", 26}, {"height", 10}, {"aria-hidden", "true"}}, key_drawing(key));
    legend += tag("span", {{"class", "key"}}, drawn + escape_html(key.text));
  }
  caption += legend.empty() ? "" : tag("span", {{"class", "legend"}}, legend);
  std::string html = tag("figcaption", {}, caption) + "\n" + std::string(body);
  if (!heading.made.empty() || !heading.numbers.empty()) {
    const std::string link = heading.numbers.empty() ? "" : " " + tag("a", {{"href", heading.numbers}}, "Numbers");
    html += tag("p", {{"class", "made"}}, escape_html(heading.made) + link) + "\n";
  }
  return tag("figure", {{"class", heading.wide ? "chart wide" : "chart"}}, "\n" + html) + "\n";
}

std::string image_figure(const Heading& heading, std::string_view body, double width, double height) {
  Sheet sheet(width);
  sheet.add_text(heading.title, "title");
  sheet.add_text(heading.caption, "soft");
  sheet.add_keys(heading.keys);
  sheet.add(body, height);
  sheet.add_text(heading.made, "soft");
  return image(heading.title, sheet.svg(), width, sheet.height());
}

std::string image(std::string_view title, std::string_view body, double width, double height) {
  return tag("svg",
             {{"xmlns", "http://www.w3.org/2000/svg"},
              {"width", width},
              {"height", height},
              {"viewBox", fmt::format("0 0 {} {}", short_number(width), short_number(height))},
              {"role", "img"}},
             fmt::format("\n{}\n{}\n{}\n{}", tag("title", {}, escape_html(title)), tag("style", {}, kFigureStyle),
                         tag("rect", {{"class", "ground"}, {"width", "100%"}, {"height", "100%"}}), body)) +
         "\n";
}

std::string svg_text(double x, double y, std::string_view look, std::string_view text) {
  return text.empty() ? "" : tag("text", {{"x", x}, {"y", y}, {"class", look}}, escape_html(text)) + "\n";
}

double text_width(std::string_view text) {
  const auto letters = std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; });
  return kLetter * static_cast<double>(letters);
}

std::string value_text(double value, Quantity quantity) {
  switch (quantity) {
    case Quantity::Bytes:
      return std::abs(value) < 9e18 ? byte_text(std::llround(value)) : rounded(value);
    case Quantity::Count:
      return prefixed(value);
    case Quantity::Number:
      break;
  }
  return rounded(value);
}

}  // namespace snug::chart
