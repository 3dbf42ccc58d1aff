// Plans for any graph: the models of benchmarks/zoo, each under ever fewer bytes, beside what can be done by hand. On
// one thread.
//
// usage: any_graph [--models A,B] [--budgets 100,35,floor] [--turns N] [--json FILE]
//        any_graph [--models A,B] --profile-to FOLDER     only writes the profiles of their steps, as FOLDER/NAME.json
//        any_graph [--models A,B] --floors-to FILE        only finds floors, and writes what is alive there as a table
//        any_graph [--models A,B] --planning-to FILE      only plans, and writes the processor's time as a table
//
// models: all of them, or those that are named; tiny_gpt2, for tests, and long_lstm, of 16,000 operators, only where
// they are named. budgets: per cents of the plain step's peak, or the fewest bytes for which a plan is found; those
// below these are passed over. MiB: how far memory rises above its level before the step, gradients included. time: of
// the processor, over that of a plain step, as the median of N ratios, with the lowest and highest; the two take turns.
// A Stepper's choice is the faster of a plan for the batch and of one for each half. Two ways whose medians each lie
// within the other's range cannot be told apart. Exit status 1 if a way has other bits than the same micro-batches
// without a plan, or a plan takes more bytes than predicted. Planning: of a Stepper's first step, in plain steps, as
// the median of N.

#include <charconv>
#include <iostream>
#include <sstream>

#include <nlohmann/json.hpp>

#include "benchmarks/zoo/contest.h"
#include "benchmarks/zoo/zoo.h"
#include "src/core/file_system.h"

namespace snug::any_graph {
namespace {

using nlohmann::ordered_json;
using zoo::Contest;
using zoo::Way;

struct Arguments {
  std::vector<std::string> models;
  std::vector<std::string> budgets{"100", "80", "65", "50", "42", "35", "30", "25", "20", "floor"};
  int turns = 5;
  std::string json, profile_to, floors_to, planning_to;
};

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> words;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, ',');) {
    words.push_back(word);
  }
  return words;
}

int positive_number(const std::string& flag, const std::string& text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 1) {
    throw ConfigError("any_graph: " + flag + " takes whole numbers from 1 on, and not " + text);
  }
  return number;
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (value.empty()) {
      throw ConfigError("any_graph: " + flag + " needs a value");
    } else if (flag == "--models") {
      arguments.models = split(value);
    } else if (flag == "--budgets") {
      arguments.budgets = split(value);
    } else if (flag == "--turns") {
      arguments.turns = positive_number(flag, value);
    } else if (flag == "--json") {
      arguments.json = value;
    } else if (flag == "--profile-to") {
      arguments.profile_to = value;
    } else if (flag == "--floors-to") {
      arguments.floors_to = value;
    } else if (flag == "--planning-to") {
      arguments.planning_to = value;
    } else {
      throw ConfigError("any_graph: " + flag + " is no option");
    }
  }
  return arguments;
}

std::vector<zoo::Species> chosen(const std::vector<std::string>& names) {
  std::vector<zoo::Species> all = zoo::zoo();
  if (names.empty()) {
    return all;
  }
  all.push_back({"tiny_gpt2", zoo::make_tiny_gpt2});
  all.push_back({"long_lstm", zoo::make_long_lstm});
  std::vector<zoo::Species> species;
  for (const std::string& name : names) {
    const auto found = std::find_if(all.begin(), all.end(), [&](const auto& each) { return each.name == name; });
    if (found == all.end()) {
      throw ConfigError("any_graph: no model is named " + name);
    }
    species.push_back(*found);
  }
  return species;
}

double mib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

bool is_within(double ratio, const std::vector<double>& ratios) {
  return ratio >= ratios.front() && ratio <= ratios.back();
}

// What a plan and a way by hand in as many bytes have to say to each other.
std::string verdict(const Contest& contest, const Way& way) {
  if (way.rival < 0) {
    return "";
  }
  const Way& rival = contest.ways[static_cast<size_t>(way.rival)];
  if (way.peak_bytes > rival.peak_bytes) {
    return "OURS TAKES MORE BYTES";
  }
  if (!way.plan && way.micro_batches == rival.micro_batches) {
    return "the same way";
  }
  if (is_within(way.ratio(), rival.ratios) && is_within(rival.ratio(), way.ratios)) {
    return "cannot be told apart";
  }
  return way.ratio() > rival.ratio() ? "OURS ABOVE THEIRS" : "ours below theirs";
}

void print(const Contest& contest) {
  std::cout << fmt::format(
      "## {}\n\n{} operators forward, {} backward, {} storages; a plain step takes {:.0f} ms at least and {:.2f} MiB. "
      "Profile: {:.2f} s. Floor: {:.2f} MiB, found in {:.2f} s; no plan takes less than {:.2f} MiB.\n\n"
      "| way | predicted MiB | MiB | predicted time | time | replayed | planning s | bits | |\n"
      "|---|---|---|---|---|---|---|---|---|\n",
      contest.name(), contest.profile.operators.size(), contest.profile.backward.size(),
      contest.profile.storages.size(), contest.plain_seconds * 1e3, mib(contest.ways[0].peak_bytes),
      contest.profile_seconds, mib(contest.floor_bytes), contest.floor_seconds, mib(contest.least_bytes));
  for (const Way& way : contest.ways) {
    std::string predicted_mib, predicted_time, replayed, planning;
    if (way.predicted_peak_bytes > 0) {
      predicted_mib =
          way.predicted_peak_bytes == way.peak_bytes ? "=" : fmt::format("{:.2f}", mib(way.predicted_peak_bytes));
      predicted_time = fmt::format("{:.3f}", way.predicted_ratio);
      replayed = std::to_string(way.replayed);
      planning = fmt::format("{:.2f}{}", way.planning_seconds, way.corrected ? " (corrected)" : "");
    }
    const std::string bits = way.micro_batches > 1 && !way.plan ? "" : way.same_bits ? "equal" : "OTHERS";
    std::cout << fmt::format("| {} | {} | {:.2f} | {} | {:.3f} ({:.3f} to {:.3f}) | {} | {} | {} | {} |\n", way.name,
                             predicted_mib, mib(way.peak_bytes), predicted_time, way.ratio(), way.ratios.front(),
                             way.ratios.back(), replayed, planning, bits, verdict(contest, way));
  }
  std::cout << std::endl;
}

std::string floor_row(const Contest& contest) {
  std::string row = fmt::format("| {} | {:.2f} | {:.2f} | {:.2f} |", contest.name(), mib(contest.ways[0].peak_bytes),
                                mib(contest.floor_bytes), mib(contest.least_bytes));
  for (const int64_t bytes : contest.at_floor.bytes) {
    row += bytes == 0 ? " |" : fmt::format(" {:.0f} % |", 100.0 * mib(bytes) / mib(contest.floor_bytes));
  }
  return row + fmt::format(" {} |\n", contest.at_floor.runs);
}

std::string planning_row(Contest& contest, int turns) {
  std::string row = fmt::format("| {} |", contest.name());
  for (const int percent : {70, 50, 30}) {
    const zoo::Planning planning = contest.time_planning(percent, turns);
    row += fmt::format(" {:.1f} ({:.2f} s), {} |", planning.seconds / planning.plain_seconds, planning.seconds,
                       planning.outcome);
  }
  return row + "\n";
}

ordered_json json_of(const Contest& contest) {
  ordered_json ways = ordered_json::array();
  for (const Way& way : contest.ways) {
    ordered_json json{
        {"name", way.name}, {"peak_bytes", way.peak_bytes}, {"ratios", way.ratios}, {"same_bits", way.same_bits}};
    if (way.predicted_peak_bytes > 0) {
      json["plan"] = {{"predicted_peak_bytes", way.predicted_peak_bytes},
                      {"predicted_ratio", way.predicted_ratio},
                      {"replayed", way.replayed},
                      {"planning_seconds", way.planning_seconds},
                      {"corrected", way.corrected}};
    }
    if (way.rival >= 0) {
      json["rival"] = contest.ways[static_cast<size_t>(way.rival)].name;
      json["verdict"] = verdict(contest, way);
    }
    ways.push_back(std::move(json));
  }
  return {{"model", contest.name()},
          {"operators", contest.profile.operators.size()},
          {"plain_seconds", contest.plain_seconds},
          {"profile_seconds", contest.profile_seconds},
          {"floor_bytes", contest.floor_bytes},
          {"floor_seconds", contest.floor_seconds},
          {"least_bytes", contest.least_bytes},
          {"ways", std::move(ways)}};
}

bool came_out_as_predicted(const Contest& contest) {
  return std::all_of(contest.ways.begin(), contest.ways.end(), [](const Way& way) {
    return way.same_bits && (way.predicted_peak_bytes == 0 || way.peak_bytes <= way.predicted_peak_bytes);
  });
}

void add_plans(Contest& contest, const std::vector<std::string>& budgets) {
  for (const std::string& budget : budgets) {
    if (budget == "floor") {
      contest.add_plan("plan at the floor", 0);
      continue;
    }
    const int64_t bytes = contest.ways[0].peak_bytes * positive_number("--budgets", budget) / 100;
    if (bytes >= contest.floor_bytes) {
      contest.add_plan(fmt::format("plan in {} %", budget), bytes);
    }
  }
}

bool run(const Arguments& arguments) {
  bool all_well = true;
  ordered_json results = ordered_json::array();
  std::string floors =
      "| model | plain MiB | floor MiB | proven MiB | operator | replay | kept | held for use | held idle | gradients "
      "of results | gradients of parameters | other | operator |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|\n";
  std::string planning = "| model | in 70 % | in 50 % | in 30 % |\n|---|---|---|---|\n";
  for (const zoo::Species& species : chosen(arguments.models)) {
    Contest contest(species.make());
    if (!arguments.profile_to.empty()) {
      detail::replace_file(arguments.profile_to + "/" + species.name + ".json", contest.profile.to_json());
      continue;
    }
    if (!arguments.planning_to.empty()) {
      planning += planning_row(contest, arguments.turns);
      detail::replace_file(arguments.planning_to, planning);
      continue;
    }
    contest.find_floor();
    if (!arguments.floors_to.empty()) {
      floors += floor_row(contest);
      detail::replace_file(arguments.floors_to, floors);
      continue;
    }
    add_plans(contest, arguments.budgets);
    contest.add_by_hand();
    contest.race(arguments.turns);
    print(contest);
    results.push_back(json_of(contest));
    all_well = all_well && came_out_as_predicted(contest);
  }
  if (!arguments.json.empty()) {
    detail::replace_file(arguments.json, results.dump(1) + "\n");
  }
  if (arguments.profile_to.empty() && arguments.floors_to.empty() && arguments.planning_to.empty()) {
    std::cout << (all_well ? "all bits equal, bytes as predicted\n"
                           : "a way has other bits, or a plan more bytes than predicted\n");
  }
  return all_well;
}

}  // namespace
}  // namespace snug::any_graph

int main(int argc, char** argv) {
  try {
    torch::set_num_threads(1);
    return snug::any_graph::run(snug::any_graph::parse(argc, argv)) ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 2;
  }
}
