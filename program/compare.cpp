// snug compare: the classic experiments on training under limits of memory and time, on this machine, as a page with
// figures.

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "program/command.h"
#include "program/compare/comparison_page.h"
#include "program/compare/experiment.h"
#include "program/datasets/digits.h"
#include "program/measure/measure.h"
#include "program/run/device.h"
#include "snug/core.h"
#include "src/core/file_system.h"
#include "src/core/nearest_name.h"
#include "src/distributed/launch_environment.h"

namespace snug::cli {
namespace {

struct Experiment {
  const char* name;
  const char* what;
  Section (*run)(const CompareFlags&);
  /// The function of this program as one of the ranks that the experiment starts.
  void (*run_as_rank)(const CompareFlags&) = nullptr;
  bool is_for_cpu_alone = false;
};

constexpr std::array kExperiments{
    Experiment{"sin-cos", "a small network in FP32 and in mixed precision: time, loss, fit", compare_sin_cos},
    Experiment{"precision", "static and dynamic bytes of FP32, autocast and 16-bit weights", compare_precision},
    Experiment{"checkpointing", "bytes and time of deep networks, for each way to keep less", compare_checkpointing},
    Experiment{"accumulation", "one batch in many parts; BatchNorm; large and small batches", compare_accumulation,
               measure_accumulation_rank},
    Experiment{"data-parallel", "1, 2, 4 processes: bytes sent, time, share hidden", compare_data_parallel,
               measure_data_parallel_rank, /*is_for_cpu_alone=*/true},
    Experiment{"fit", "the largest GPT in a number of bytes, technique by technique", compare_fit},
    Experiment{"python", "ratios to Python PyTorch, as benchmarks/run.py measured them", compare_python},
};

struct Flags {
  std::vector<std::string> names;
  std::string out = "compare";
  std::string device = "cpu";
  CompareFlags experiments;
};

std::vector<Experiment> chosen(const Flags& flags) {
  const std::vector<std::string>& names = flags.names;
  std::vector<std::string> known{"all"};
  for (const Experiment& experiment : kExperiments) {
    known.emplace_back(experiment.name);
  }
  for (const std::string& name : names) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      throw ConfigError(
          fmt::format("compare: there is no experiment '{}'; did you mean '{}'?", name, nearest_name(name, known)));
    }
  }
  const std::set<std::string> wanted(names.begin(), names.end());
  std::vector<Experiment> result;
  for (const Experiment& experiment : kExperiments) {
    const bool is_named = wanted.contains(experiment.name);
    const bool has_input = experiment.run != compare_python || !flags.experiments.results.empty();
    if (is_named && !has_input) {
      throw ConfigError("compare: python draws what benchmarks/run.py measured; name that file with --results");
    }
    const bool is_left_out = experiment.is_for_cpu_alone && !flags.experiments.device.is_cpu();
    if (is_named && is_left_out) {
      throw ConfigError(
          fmt::format("compare: {} is for the CPU alone; run it without --device {}", experiment.name, flags.device));
    }
    if (is_named || (has_input && !is_left_out && (wanted.empty() || wanted.contains("all")))) {
      result.push_back(experiment);
    }
  }
  return result;
}

void print_row(const std::vector<std::string>& cells, const std::vector<size_t>& widths) {
  for (size_t i = 0; i < cells.size(); ++i) {
    if (i == 0) {
      fmt::print("  {:<{}}", cells[i], widths[i]);
    } else {
      fmt::print("  {:>{}}", cells[i], widths[i]);
    }
  }
  fmt::print("\n");
}

void print_table(const std::string& title, const Table& table) {
  std::vector<size_t> widths;
  for (size_t i = 0; i < table.header.size(); ++i) {
    widths.push_back(table.header[i].size());
    for (const auto& row : table.rows) {
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  fmt::print("\n{}\n", title);
  print_row(table.header, widths);
  for (const auto& row : table.rows) {
    print_row(row, widths);
  }
}

void print_result(const Section& section) {
  for (const Exhibit& exhibit : section.exhibits) {
    if (const auto* table = std::get_if<Table>(&exhibit.content)) {
      print_table(exhibit.caption.empty() ? exhibit.title : exhibit.title + ": " + exhibit.caption, *table);
    }
  }
  fmt::print("\n");
  for (const std::string& finding : section.findings) {
    fmt::print("- {}\n", finding);
  }
  fmt::print("\n");
}

void write(const std::filesystem::path& file, const std::string& text) { detail::replace_file(file, text); }

void check(const Flags& flags) {
  const auto at_least = [](const char* flag, int64_t value, int64_t least) {
    if (value != 0 && value < least) {
      throw ConfigError(fmt::format("compare: {} is {}; give a number >= {}", flag, value, least));
    }
  };
  at_least("--pairs", flags.experiments.pairs, 1);
  at_least("--epochs", flags.experiments.epochs, 1);
  at_least("--points", flags.experiments.points, 100);
  if (!flags.experiments.results.empty() && !flags.experiments.device.is_cpu()) {
    throw ConfigError(
        fmt::format("compare: --results is about programs on the CPU; give it without --device {}", flags.device));
  }
}

// The list of experiments that were left out, in words, for the page.
std::string left_out(const Flags& flags) {
  const std::vector<std::string>& names = flags.names;
  const bool wants_all = names.empty() || std::find(names.begin(), names.end(), "all") != names.end();
  return flags.experiments.device.is_cpu() || !wants_all ? ""
                                                         : "; data-parallel is left out, as its ranks are for the CPU";
}

// Checks inputs before hours of measuring.
void check_inputs(const std::vector<Experiment>& experiments, const Flags& flags) {
  const bool needs_digits = std::any_of(experiments.begin(), experiments.end(),
                                        [](const Experiment& one) { return one.run == compare_accumulation; });
  if (needs_digits) {
    load_digits(flags.experiments.digits);
  }
}

void measure_as_rank(const std::vector<Experiment>& experiments, const Flags& flags) {
  if (experiments.size() != 1 || experiments.front().run_as_rank == nullptr) {
    throw ConfigError("compare: experiments start their ranks themselves; leave the launcher out");
  }
  experiments.front().run_as_rank(flags.experiments);
}

void run_compare(Flags& flags) {
  flags.experiments.device = make_current(parse_device("compare", flags.device));
  use_growing_segments(flags.experiments.device);
  check(flags);
  const std::vector<Experiment> experiments = chosen(flags);
  if (detail::read_launch_environment(detail::process_environment()).launcher != detail::LaunchPlace().launcher) {
    measure_as_rank(experiments, flags);
    return;
  }
  check_inputs(experiments, flags);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);        // output that goes to a file can be watched
  std::filesystem::create_directories(flags.out);  // at once, not after an hour of measuring
  ComparisonPage page{.title = "Training under limits, side by side",
                      .subtitle = measure::machine(flags.experiments.device) + left_out(flags)};
  fmt::print("{}\n", page.subtitle);
  const std::filesystem::path file = std::filesystem::path(flags.out) / "index.html";
  for (const Experiment& experiment : experiments) {
    fmt::print("\n== {}: {}\n\n", experiment.name, experiment.what);
    page.sections.push_back(experiment.run(flags.experiments));
    print_result(page.sections.back());
    for (const Exhibit& exhibit : page.sections.back().exhibits) {
      write(std::filesystem::path(flags.out) / (exhibit.file + ".csv"),
            exhibit_csv(exhibit, flags.experiments.device.str()));
      if (const std::string picture = exhibit_svg(exhibit); !picture.empty()) {
        write(std::filesystem::path(flags.out) / (exhibit.file + ".svg"), picture);
      }
    }
    write(file, comparison_page(page));  // after each experiment, so that an interruption loses only one
    write(std::filesystem::path(flags.out) / "results.md", comparison_markdown(page));
  }
  fmt::print("{}\n", file.string());
}

std::string names_and_subjects() {
  std::string text = "Experiments:\n";
  for (const Experiment& experiment : kExperiments) {
    text += fmt::format("  {:<15} {}\n", experiment.name, experiment.what);
  }
  return text +
         "\nWrites DIR/index.html, a page that loads nothing; beside it each figure as SVG, its numbers as CSV, and "
         "results.md.\n"
         "Times are ratios of programs that take turns.";
}

}  // namespace

void add_compare(CLI::App& app) {
  CLI::App* command = app.add_subcommand("compare", "Run the classic experiments side by side, and draw them");
  const auto flags = std::make_shared<Flags>();
  CompareFlags& experiments = flags->experiments;
  command->add_option("experiments", flags->names, "Which (default all)")->type_name("EXPERIMENT")->take_all();
  command->add_flag("--quick", experiments.quick, "Smaller: all of them in about five minutes");
  command->add_option("--out", flags->out, "Where the page goes (default compare)")->type_name("DIR");
  command->add_option("--device", flags->device, "cpu (default), cuda, cuda:1, or what else LibTorch finds")
      ->type_name("DEVICE");
  command->add_option("--results", experiments.results, "python: the table that benchmarks/run.py wrote")
      ->type_name("FILE");
  command->add_option("--pairs", experiments.pairs, "Turns in a comparison of times")->type_name("N");
  command->add_option("--digits", experiments.digits, "accumulation: digits as of MNIST (default build/data/digits)")
      ->type_name("DIR");
  command->add_option("--epochs", experiments.epochs, "sin-cos: epochs (default 1000)")->type_name("N");
  command->add_option("--points", experiments.points, "sin-cos: points (default 20000)")->type_name("N");
  command->footer(names_and_subjects());
  command->callback([flags] { run_compare(*flags); });
}

}  // namespace snug::cli
