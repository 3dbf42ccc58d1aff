#include "program/report/html_report.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "program/chart/median.h"
#include "program/chart/page.h"
#include "program/chart/tag.h"
#include "program/chart/text.h"
#include "program/report/gradient_map.h"
#include "program/report/report_charts.h"

namespace snug {
namespace {

using chart::byte_text;
using chart::card;
using chart::escape_html;
using chart::grouped;
using chart::tag;
using detail::Records;

constexpr const char* kPlanEvent = "plan";

std::string capitalized(std::string text) {
  if (!text.empty() && text[0] >= 'a' && text[0] <= 'z') {
    text[0] = static_cast<char>(text[0] - 'a' + 'A');
  }
  return text;
}

std::string at_step(const StepRecord& record) { return "at step " + grouped(record.step); }

std::string final_loss_card(const Records& records) {
  const std::string label = "Final training loss";
  return records.empty() ? card(label, "–", "no steps yet")
                         : card(label, chart::rounded(records.back().loss), at_step(records.back()));
}

std::string validation_card(const Records& records) {
  const StepRecord* best = nullptr;
  for (const StepRecord& record : records) {
    if (record.validation_loss && !std::isnan(*record.validation_loss) &&
        (best == nullptr || *record.validation_loss < *best->validation_loss)) {
      best = &record;
    }
  }
  const std::string label = "Best validation loss";
  return best == nullptr ? card(label, "–", "not measured")
                         : card(label, chart::rounded(*best->validation_loss), at_step(*best));
}

std::string throughput_card(const Records& records, const std::string& item) {
  std::vector<double> rates;
  for (const StepRecord& record : records) {
    rates.push_back(record.items_per_second);
  }
  const std::string label = capitalized(item) + " per second";
  const double middle = chart::median(rates);
  const bool readable = middle >= 1000 && middle < 1e6;
  return records.empty()
             ? card(label, "–", "no steps yet")
             : card(label, readable ? grouped(std::llround(middle)) : chart::prefixed(middle), "median over all steps");
}

std::string memory_card(const Records& records) {
  int64_t peak = 0;
  int64_t activations = 0;
  for (const StepRecord& record : records) {
    peak = std::max(peak, record.peak_bytes);
    activations = std::max(activations, record.activation_peak_bytes);
  }
  return records.empty() ? card("Peak memory", "–", "no steps yet")
                         : card("Peak memory", byte_text(peak), "activation peak " + byte_text(activations));
}

// Empty for a run on one rank.
std::string communication_card(const Records& records) {
  int64_t bytes = 0;
  double seconds = 0;
  double waited = 0;
  for (const StepRecord& record : records) {
    if (record.communication) {
      bytes = std::max(bytes, record.communication->bytes_sent);
      seconds += record.communication->seconds;
      waited += record.communication->waited;
    }
  }
  if (bytes == 0) {
    return "";
  }
  const double hidden = seconds > 0 ? std::clamp(1 - waited / seconds, 0.0, 1.0) : 0.0;
  return card("Gradients sent", byte_text(bytes),
              fmt::format("each step and rank, {:.0f} % of the time hidden behind backward", 100 * hidden));
}

std::string summary(const Records& records, const std::string& item) {
  if (records.empty()) {
    return "No steps were logged.";
  }
  double items = 0;
  double seconds = 0;
  for (const StepRecord& record : records) {
    items += static_cast<double>(record.items);
    seconds += std::isfinite(record.seconds) ? record.seconds : 0;
  }
  return fmt::format("{} {} · {} {} · {}", grouped(static_cast<int64_t>(records.size())),
                     records.size() == 1 ? "step" : "steps", chart::prefixed(items), item, chart::duration(seconds));
}

std::string value_text(const LogValue& value) {
  if (const auto* text = std::get_if<std::string>(&value)) {
    return *text;
  }
  if (const auto* flag = std::get_if<bool>(&value)) {
    return *flag ? "yes" : "no";
  }
  if (const auto* whole = std::get_if<int64_t>(&value)) {
    return grouped(*whole);
  }
  return fmt::format("{}", std::get<double>(value));
}

std::string settings_section(const LogValues& settings) {
  if (settings.empty()) {
    return "";
  }
  std::string rows;
  for (const auto& [name, value] : settings) {
    rows += tag("div", {}, tag("dt", {}, escape_html(name)) + tag("dd", {}, escape_html(value_text(value)))) + "\n";
  }
  return tag("h2", {}, "Settings") + "\n" + tag("div", {{"class", "box"}}, tag("dl", {}, "\n" + rows)) + "\n";
}

// The parser drops a line feed right after <pre>, so text_box writes a line feed of its own after <pre>.
std::string text_box(const std::string& text) {
  return tag("pre", {{"class", "box"}, {"tabindex", "0"}}, "\n" + escape_html(text)) + "\n";
}

std::string sample_section(const std::string& sample) {
  if (sample.empty()) {
    return "";
  }
  return tag("h2", {}, "A sample of what it writes") + "\n" + text_box(sample);
}

std::string gradients_section(const RunHistory& history) {
  const int64_t sampled = detail::last_gradient_sample(history.events);
  double loss_scale = 1;
  for (const StepRecord& record : history.records) {
    loss_scale = record.step == sampled ? record.loss_scale : loss_scale;
  }
  return detail::gradient_map(history.events, loss_scale);
}

// The last plan of the run, beside the measurements under the plan.
std::string plan_section(const RunHistory& history) {
  std::string explanation;
  int64_t planned_at = 0;
  for (const RunEvent& event : history.events) {
    for (const auto& [name, value] : event.details) {
      if (event.name == kPlanEvent && name == "explanation") {
        explanation = value_text(value);
        planned_at = event.step;
      }
    }
  }
  if (explanation.empty()) {
    return "";
  }
  int64_t peak = 0;
  for (const StepRecord& record : history.records) {
    peak = record.step >= planned_at ? std::max(peak, record.peak_bytes) : peak;
  }
  const std::string made =
      fmt::format("Made in step {}; the most that was alive since then: {}.", grouped(planned_at), byte_text(peak));
  return tag("h2", {}, "The plan") + "\n" + tag("p", {}, made) + "\n" + text_box(explanation);
}

std::string events_section(std::vector<RunEvent> events) {
  std::erase_if(events, [](const RunEvent& event) {
    return event.name == detail::kGradientsEvent || event.name == kPlanEvent;  // shown above
  });
  if (events.empty()) {
    return "";
  }
  std::string rows;
  for (const RunEvent& event : events) {
    std::string details;
    for (const auto& [name, value] : event.details) {
      details += fmt::format("{}{}: {}", details.empty() ? "" : ", ", name, value_text(value));
    }
    rows += tag("tr", {},
                tag("td", {}, "step " + grouped(event.step)) + tag("td", {}, escape_html(event.name)) +
                    tag("td", {}, escape_html(details))) +
            "\n";
  }
  const std::string table = tag("table", {{"class", "events"}}, "\n" + rows);
  return tag("details", {},
             tag("summary", {}, fmt::format("Events ({})", events.size())) + "\n" +
                 tag("div", {{"class", "box"}}, table)) +
         "\n";
}

std::string charts(const Records& records, const std::string& item) {
  if (records.empty()) {
    return "";  // the heading says so
  }
  return detail::loss_chart(records) + detail::learning_rate_chart(records) + detail::gradient_norm_chart(records) +
         detail::throughput_chart(records, item) + detail::loss_scale_chart(records) +
         detail::gradient_noise_chart(records) + detail::memory_chart(records) + detail::memory_peak(records);
}

}  // namespace

std::string html_report(const RunHistory& history, const ReportExtras& extras) {
  Records records = history.records;
  std::stable_sort(records.begin(), records.end(),
                   [](const StepRecord& a, const StepRecord& b) { return a.step < b.step; });
  const std::string cards = final_loss_card(records) + validation_card(records) +
                            throughput_card(records, extras.item) + memory_card(records) + communication_card(records);
  std::string main = tag("div", {{"class", "cards"}}, "\n" + cards) + "\n";
  main += tag("div", {{"class", "charts"}}, "\n" + charts(records, extras.item)) + "\n";
  main += plan_section(history) + gradients_section(history) + sample_section(extras.sample) +
          settings_section(history.settings) + events_section(history.events);
  return chart::document(extras.title, summary(records, extras.item), main,
                         "Written by snug. Bytes are measured, in powers of 1024.");
}

}  // namespace snug
