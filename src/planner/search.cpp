#include "src/planner/search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <list>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/core/versioned_json.h"
#include "src/planner/bound.h"

// A step fits into a budget with smaller micro-batches, or with a plan that rebuilds and offloads. Neither is best for
// all models, and both can be combined. How many items should a micro-batch have, and which plan should it have?
//
// A step of micro-batches of n items has
//
//   before  = fixed bytes + own bytes of the candidate + gradients, if the step has several micro-batches
//   peak    = max(before + peak of the plan, fixed bytes + gradients + workspace of the optimizer)
//   seconds = batch / n * seconds of the plan + seconds of the optimizer
//
// Candidates are few, and solving a candidate takes nearly all of the time. So the search is a loop: each candidate is
// solved for budget - before. Times are measured, and other work of the machine changes them by a few percent. So the
// choice is not the fastest step, but the step with the fewest micro-batches of all that take at most kApart times as
// long. Then a busy machine seldom turns the choice, and with the choice the bits of training.
//
// Candidates with the shortest bound come first: no plan within budget - before takes less time than the bound. A
// candidate that would not be chosen with the bound's time is not solved, and neither is a candidate without any plan
// within budget - before, whose bound is infinite.
//
// If no candidate has a plan, the most frugal plan of each candidate is searched. Usually the plan takes too much, and
// the least bytes of all candidates are reported. If the plan fits, the search for a fast plan had missed the plan;
// then the plan is taken, and the search is repeated with the plan as a beginning.

namespace snug::plan {
namespace {

using Json = detail::OrderedJson;

constexpr detail::JsonKind kChoiceJson{
    .key = "snug_step_choice", .type = "StepChoice", .noun = "choice", .cure = "plan again"};

void check(const std::vector<Candidate>& candidates, const SearchOptions& options) {
  if (candidates.empty() || options.batch < 1) {
    throw ConfigError(fmt::format("Planning: {} candidates for a batch of {} items; give at least one of each",
                                  candidates.size(), options.batch));
  }
  for (const Candidate& candidate : candidates) {
    if (candidate.items < 1 || candidate.simulator == nullptr) {
      throw ConfigError(fmt::format("Planning: a candidate has {} items and {} simulator; it needs at least 1 of each",
                                    candidate.items, candidate.simulator == nullptr ? "no" : "a"));
    }
  }
}

// A candidate with facts that need no solver. The formulas are in the essay above.
struct Split {
  Candidate candidate;
  int64_t micro_batches;
  double times;  // number of full micro-batches that take as long as the whole step
  int64_t before;
  Simulation plain;
  double bound;  // seconds of the step

  double seconds(double of_one, const SearchOptions& options) const {
    return times * of_one + options.optimizer_seconds;
  }
};

// In the order of their plain times.
std::vector<Split> splits(const std::vector<Candidate>& candidates, const SearchOptions& options) {
  std::vector<Split> all;
  for (const Candidate& candidate : candidates) {
    const int64_t items = std::min(candidate.items, options.batch);
    const int64_t count = (options.batch + items - 1) / items;
    all.push_back({candidate, count, static_cast<double>(options.batch) / static_cast<double>(items),
                   options.fixed_bytes + candidate.own_bytes + (count > 1 ? options.gradient_bytes : 0),
                   candidate.simulator->run(keep_all(candidate.simulator->profile())), 0});
    Split& split = all.back();
    split.bound = split.seconds(lower_bound_seconds(*candidate.simulator, options.budget - split.before), options);
  }
  std::stable_sort(all.begin(), all.end(), [](const Split& a, const Split& b) {
    const double first = a.times * a.plain.seconds;
    const double second = b.times * b.plain.seconds;
    return first != second ? first < second : a.candidate.items > b.candidate.items;
  });
  return all;
}

// Numbers of splits, the shortest bound first.
std::vector<size_t> by_bound(const std::vector<Split>& all) {
  std::vector<size_t> numbers(all.size());
  std::iota(numbers.begin(), numbers.end(), size_t{0});
  std::stable_sort(numbers.begin(), numbers.end(), [&](size_t a, size_t b) { return all[a].bound < all[b].bound; });
  return numbers;
}

}  // namespace

Search search(const std::vector<Candidate>& candidates, const SearchOptions& options) {
  check(candidates, options);
  const int64_t optimizer = options.fixed_bytes + options.gradient_bytes + options.optimizer_bytes;
  const std::vector<Split> all = splits(candidates, options);
  Search result;
  std::list<Solver> own;  // of candidates that have none
  std::vector<Solver*> solvers;
  for (const Split& split : all) {
    Solver* const given = split.candidate.solver;
    solvers.push_back(given != nullptr ? given : &own.emplace_back(*split.candidate.simulator, options.solver));
    result.considered.push_back({split.candidate.items, split.micro_batches,
                                 std::max(optimizer, split.before + split.plain.peak_bytes),
                                 split.seconds(split.plain.seconds, options)});
  }
  std::vector<std::optional<Solution>> plans(all.size());
  const auto seconds_of = [&](size_t i) { return result.considered[i].least_seconds; };
  double fastest = std::numeric_limits<double>::infinity();
  const auto is_better = [&](size_t i, const Choice& than) {
    return seconds_of(i) <= kApart * fastest &&
           (than.seconds > kApart * fastest ||
            std::tuple(all[i].micro_batches, seconds_of(i)) < std::tuple(than.micro_batches, than.seconds));
  };
  const auto note = [&](const Answer& answer, size_t i) {
    const Split& split = all[i];
    Considered& one = result.considered[i];
    const Solution* plan = std::get_if<Solution>(&answer);
    one.least_seconds =
        plan != nullptr ? split.seconds(plan->seconds, options) : std::numeric_limits<double>::infinity();
    if (plan == nullptr) {
      return;
    }
    plans[i] = *plan;
    one.verdict = fmt::format("{:.3f} ms in {}", 1e3 * one.least_seconds, Bytes(split.before + plan->peak_bytes).str());
    fastest = std::min(fastest, one.least_seconds);
    for (size_t k = 0; k < all.size(); ++k) {
      if (plans[k] && (!result.choice || is_better(k, *result.choice))) {
        result.choice = {.items = std::min(all[k].candidate.items, options.batch),
                         .micro_batches = all[k].micro_batches,
                         .plan = *plans[k],
                         .peak_bytes = std::max(optimizer, all[k].before + plans[k]->peak_bytes),
                         .seconds = seconds_of(k)};
      }
    }
  };
  // Whether the candidate might be chosen if its plan took no more time than the bound.
  const auto may_be_chosen = [&](const Split& split) {
    const int64_t more = split.micro_batches - result.choice->micro_batches;
    return more < 0    ? split.bound <= kApart * fastest
           : more == 0 ? split.bound < result.choice->seconds
                       : kApart * split.bound < result.choice->seconds;
  };
  for (const size_t i : by_bound(all)) {
    const Split& split = all[i];
    Considered& one = result.considered[i];
    one.least_seconds = split.bound;
    if (optimizer > options.budget) {
      one.verdict = "the optimizer's step does not fit";
    } else if (std::isinf(split.bound)) {
      one.verdict = "does not fit, whatever it keeps";
    } else if (result.choice && !may_be_chosen(split)) {
      one.verdict = split.bound >= result.choice->seconds
                        ? "slower, whatever it keeps"
                        : fmt::format("at most {:.1f} % faster, whatever it keeps",
                                      100 * (result.choice->seconds / split.bound - 1));
    } else {
      one.verdict = "does not fit";
      note(solvers[i]->solve(options.budget - split.before), i);
    }
  }
  if (!result.choice) {
    int64_t least = std::numeric_limits<int64_t>::max(), bound = least;
    std::pair<size_t, Stays> least_has;
    for (size_t i = 0; i < all.size(); ++i) {
      const Solution smallest = solvers[i]->smallest();
      if (all[i].before + smallest.peak_bytes < least) {
        least = all[i].before + smallest.peak_bytes;
        least_has = {i, smallest.stays};
      }
      bound = std::min(bound, all[i].before + lower_bound_bytes(*all[i].candidate.simulator));
      if (std::max(optimizer, all[i].before + smallest.peak_bytes) <= options.budget) {  // the search missed the plan
        note(smallest, i);
        note(solvers[i]->solve(options.budget - all[i].before), i);
      }
    }
    if (const auto& [i, stays] = least_has; !result.choice && least >= optimizer) {
      result.least_is = sentence(all[i].candidate.simulator->at_peak(stays), all[i].before);
    }
    result.smallest_feasible_bytes = result.choice ? 0 : std::max(optimizer, least);
    result.lower_bound_bytes = result.choice ? 0 : std::max(optimizer, bound);
  }
  return result;
}

std::string Considered::row(std::string_view more) const {
  return fmt::format("{:>12} {:>14} {:>12} {:>10.3f} ms   {}{}{}\n", items, micro_batches,
                     Bytes(plain_peak_bytes).str(), 1e3 * plain_seconds, verdict, more.empty() ? "" : "  ", more);
}

std::string Search::explain() const {
  std::string text = fmt::format("{:>12} {:>14} {:>12} {:>13}   with a plan\n", "micro-batch", "micro-batches",
                                 "plain peak", "plain step");
  for (const Considered& one : considered) {
    text += one.row(choice && choice->items == one.items ? "<- chosen" : "");
  }
  if (!choice) {
    return text;
  }
  double others = std::numeric_limits<double>::infinity();
  for (const Considered& one : considered) {
    others = one.items != choice->items ? std::min(others, one.least_seconds) : others;
  }
  if (const double ratio = others / choice->seconds; ratio < kApart) {
    text += fmt::format(
        "The choice is not sure: another micro-batch takes {:.2f} of the time, and measured times are within {:.0f} %. "
        "Fewer micro-batches are preferred.\n",
        ratio, 100 * (kApart - 1));
  } else if (!std::isinf(others)) {
    constexpr double kSure = 1.25;
    text += fmt::format("The choice is {}: other micro-batches take at least {:.2f} times as long{}.\n",
                        ratio < kSure ? "likely" : "sure", ratio,
                        ratio < kSure ? ", unless other work of the machine has disturbed the times" : "");
  }
  return text;
}

std::string Choice::to_json() const {
  return detail::versioned_json(kChoiceJson, {{"items", items},
                                              {"micro_batches", micro_batches},
                                              {"peak_bytes", peak_bytes},
                                              {"seconds", seconds},
                                              {"plan", Json::parse(plan.to_json())}})
      .dump();
}

Choice Choice::from_json(std::string_view text) {
  return detail::read_versioned_json(kChoiceJson, text, [](const Json& json) {
    return Choice{.items = detail::whole_number<int64_t>(json.at("items")),
                  .micro_batches = detail::whole_number<int64_t>(json.at("micro_batches")),
                  .plan = Solution::from_json(json.at("plan").dump()),
                  .peak_bytes = detail::whole_number<int64_t>(json.at("peak_bytes")),
                  .seconds = json.at("seconds").get<double>()};
  });
}

}  // namespace snug::plan
