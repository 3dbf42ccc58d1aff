// The data-parallel experiment: steps of K micro-batches on 1, 2 and 4 processes, communicating after each micro-batch
// or after the last. See ranks.h for the start of the ranks; as one of the ranks the program measures.

#include "snug/distributed/data_parallel.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "program/compare/experiment.h"
#include "program/compare/ranks.h"
#include "program/measure/measure.h"
#include "program/measure/parallel_gpt.h"
#include "snug/core.h"
#include "snug/distributed/process_group.h"

namespace snug::cli {

using namespace measure;

namespace {

constexpr std::array<int, 4> kSplits{1, 2, 4, 8};
constexpr std::string_view kRow = "data-parallel-row";

// The measurements of one variant of a step; a rank sends a Row as a line of text.
struct Row {
  int ranks = 0, micro_batches = 0;
  int communicates_each = 0;
  int64_t bytes = 0;   // sent by a rank in a step
  double seconds = 0;  // of a step, on the slowest rank; the median
  double hidden = 0;   // share of the communication's time that is hidden
};

// --- On a rank.

// Measures both variants of a step, in turns.
std::array<Row, 2> measure_variants(ParallelGpt& gpt, int micro_batches, int64_t rounds) {
  const DataParallel& data_parallel = gpt.data_parallel();
  std::array<Row, 2> rows;
  std::array<std::vector<double>, 2> seconds;
  std::array<DataParallel::CommunicationTime, 2> under_way;
  // The first round warms up: buckets change after the first round.
  for (int64_t round = -1; round < rounds; ++round) {
    for (const int turn : {0, 1}) {
      const int each = (turn + static_cast<int>(round) + 2) % 2;
      const int64_t bytes = data_parallel.bytes_reduced();
      const DataParallel::CommunicationTime before = data_parallel.communication();
      const double time = slowest_seconds(gpt.group(), [&] { gpt.step(micro_batches, each == 1 ? micro_batches : 1); });
      const auto way = static_cast<size_t>(each);
      rows[way] = {.ranks = gpt.group().size(), .micro_batches = micro_batches, .communicates_each = each};
      rows[way].bytes = gpt.group().size() > 1 ? data_parallel.bytes_reduced() - bytes : 0;
      if (round >= 0) {
        seconds[way].push_back(time);
        under_way[way].total += data_parallel.communication().total - before.total;
        under_way[way].waited += data_parallel.communication().waited - before.waited;
      }
    }
  }
  for (size_t way = 0; way < 2; ++way) {
    rows[way].seconds = spread_of(seconds[way]).median;
    rows[way].hidden = under_way[way].total > 0 ? 1 - under_way[way].waited / under_way[way].total : 0;
  }
  return rows;
}

// --- On the side that starts the ranks.

std::vector<Row> rows_of(int ranks, const CompareFlags& flags) {
  std::vector<Row> rows;
  for (const std::string& line : lines_of_ranks("data-parallel", ranks, flags, kRow, 2 * kSplits.size())) {
    Row& row = rows.emplace_back();
    if (std::sscanf(line.c_str(), "%d %d %d %ld %lf %lf", &row.ranks, &row.micro_batches, &row.communicates_each,
                    &row.bytes, &row.seconds, &row.hidden) != 6) {
      throw Error("compare: the ranks' result cannot be read: " + line);
    }
  }
  return rows;
}

const char* when(const Row& row) { return row.communicates_each != 0 ? "after each" : "after the last"; }

void add_figures(Section& section, const std::vector<Row>& rows, const std::string& made) {
  Plot bytes{.x = {.title = "micro-batches in a step", .log_base = 2},
             .y = {.title = "sent by a rank in a step", .quantity = Quantity::Bytes, .from_zero = true},
             .wide = false};
  Plot times{.x = {.title = "micro-batches in a step", .log_base = 2},
             .y = {.title = "ms a micro-batch", .from_zero = true},
             .wide = false};
  Table table{.header = {"ranks", "K", "communicates", "bytes a step", "ms a step", "hidden behind backward"}};
  for (const Row& row : rows) {
    for (auto* plot : {&bytes, &times}) {
      if (row.ranks == 1 && (plot == &bytes || row.communicates_each != 0)) {
        continue;  // one rank alone sends nothing in both variants
      }
      const std::string name = row.ranks == 1 ? "1 process" : fmt::format("{} processes, {}", row.ranks, when(row));
      auto curve =
          std::find_if(plot->curves.begin(), plot->curves.end(), [&](const Curve& c) { return c.name == name; });
      if (curve == plot->curves.end()) {
        curve = plot->curves.insert(curve, {.name = name, .x = {}, .y = {}, .drawn = Drawn::LineAndPoints});
      }
      curve->x.push_back(row.micro_batches);
      curve->y.push_back(plot == &bytes ? static_cast<double>(row.bytes) : 1e3 * row.seconds / row.micro_batches);
    }
    if (row.ranks > 1 || row.communicates_each == 0) {
      table.rows.push_back({fmt::format("{}", row.ranks), fmt::format("{}", row.micro_batches),
                            row.ranks == 1 ? "-" : when(row), bytes_text(row.bytes),
                            fmt::format("{:.1f}", 1e3 * row.seconds), row.ranks == 1 ? "-" : percent(row.hidden)});
    }
  }
  section.exhibits.push_back({.file = "data-parallel-bytes", .title = "Bytes sent", .made = made, .content = bytes});
  section.exhibits.push_back({.file = "data-parallel-time", .title = "Time", .made = made, .content = times});
  section.exhibits.push_back({.file = "data-parallel-table", .title = "In numbers", .made = made, .content = table});
}

}  // namespace

void measure_data_parallel_rank(const CompareFlags& flags) {
  const auto group = init_process_group();
  ParallelGpt gpt(group, /*layers=*/flags.quick ? 2 : 6, /*width=*/flags.quick ? 128 : 256);
  for (const int k : kSplits) {
    for (const Row& row : measure_variants(gpt, k, flags.turns(7))) {
      if (group->rank() == 0) {
        fmt::print("{} {} {} {} {} {} {}\n", kRow, row.ranks, row.micro_batches, row.communicates_each, row.bytes,
                   row.seconds, row.hidden);
      }
    }
  }
  group->barrier();
}

Section compare_data_parallel(const CompareFlags& flags) {
  Section section{
      .name = "data-parallel",
      .title = "Data parallel: how often to communicate",
      .idea =
          "Every process has the model and a share of the batch. Gradients need to be exchanged once a step, not "
          "once a micro-batch; and while backward still computes, those that are ready can be on their way."};
  std::vector<Row> rows;
  for (const int ranks : {1, 2, 4}) {
    fmt::print("{} process{}\n", ranks, ranks == 1 ? "" : "es");
    const std::vector<Row> measured = rows_of(ranks, flags);
    rows.insert(rows.end(), measured.begin(), measured.end());
  }
  const auto find = [&](int ranks, int k, int each) {
    return *std::find_if(rows.begin(), rows.end(), [&](const Row& row) {
      return row.ranks == ranks && row.micro_batches == k && row.communicates_each == each;
    });
  };
  const Row often = find(2, 8, 1), once = find(2, 8, 0);
  section.numbers = {
      {"Bytes, 8 micro-batches", fmt::format("1/{}", often.bytes / std::max<int64_t>(1, once.bytes)),
       "sent after the last only"},
      {"Step time", fmt::format("{:.2f} x", once.seconds / often.seconds), "of sending after each, 2 processes"},
      {"Hidden", percent((find(2, 1, 0).hidden + find(2, 1, 1).hidden) / 2),
       "of the time on the way, K = 1, 2 processes"}};
  section.findings.push_back(
      fmt::format("2 processes, 8 micro-batches: {} sent in a step if each communicates, {} if the last does; the step "
                  "takes {:.2f} of the time.",
                  bytes_text(often.bytes), bytes_text(once.bytes), once.seconds / often.seconds));
  add_figures(
      section, rows,
      fmt::format("A GPT of {}, micro-batches of 2 x 128 tokens, Gloo over loopback; {} hardware threads shared by all "
                  "processes; medians of {} steps, both ways in turns.",
                  flags.quick ? "2 blocks, 128 wide" : "6 blocks, 256 wide", std::thread::hardware_concurrency(),
                  flags.turns(7)));
  return section;
}

}  // namespace snug::cli
