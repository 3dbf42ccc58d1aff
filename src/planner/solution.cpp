#include "src/planner/solution.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "snug/core.h"
#include "src/core/versioned_json.h"
#include "src/planner/simulator.h"

namespace snug::plan {
namespace {

using Json = detail::OrderedJson;

constexpr detail::JsonKind kPlanJson{.key = "snug_remat_plan", .type = "Plan", .noun = "plan", .cure = "plan again"};

// A Stay as a number: the event from which on the storage stays, or a constant.
constexpr int kStreamed = -3;
constexpr int kOffloaded = -2;
constexpr int kKept = -1;
constexpr int kNever = std::numeric_limits<int>::max();

int number_of(Stay stay) {
  switch (stay.kind) {
    case Stay::Kind::Streamed:
      return kStreamed;
    case Stay::Kind::Offloaded:
      return kOffloaded;
    case Stay::Kind::Kept:
      return kKept;
    case Stay::Kind::From:
      return stay.event;
    case Stay::Kind::Never:
      return kNever;
  }
  throw Error("Plan: a storage of an unknown kind of stay");
}

Stay stay_of(int number) {
  if (number < kStreamed) {
    throw ConfigError(fmt::format("Plan: a storage stays from event {}, which is none; plan again", number));
  }
  return number == kStreamed    ? Stay::streamed()
         : number == kOffloaded ? Stay::offloaded()
         : number == kKept      ? Stay::kept()
         : number == kNever     ? Stay::never()
                                : Stay::from(number);
}

std::vector<int> numbers_of(const Stays& stays) {
  std::vector<int> numbers(stays.size());
  std::ranges::transform(stays, numbers.begin(), number_of);
  return numbers;
}

Stays stays_of(const std::vector<int>& numbers) {
  Stays stays(numbers.size());
  std::ranges::transform(numbers, stays.begin(), stay_of);
  return stays;
}

std::vector<int> numbers_in(const Json& json) {
  std::vector<int> numbers;
  for (const Json& number : json) {
    numbers.push_back(detail::whole_number<int>(number));
  }
  return numbers;
}

struct Share {
  int count = 0;
  int64_t bytes = 0;
  double seconds = 0;
};

using Shares = std::vector<std::pair<std::string, Share>>;

template <class Less>
Shares sorted(const std::map<std::string, Share>& shares, Less less) {
  Shares rows(shares.begin(), shares.end());
  std::stable_sort(rows.begin(), rows.end(), [&](const auto& a, const auto& b) { return less(b.second, a.second); });
  return rows;
}

std::string table(const Shares& rows, int limit) {
  std::string text;
  for (int i = 0; i < std::min(limit, static_cast<int>(rows.size())); ++i) {
    const auto& [name, share] = rows[static_cast<size_t>(i)];
    text += fmt::format("  {:<32} {:>5} x {:>12} {:>10.3f} ms\n", name, share.count, Bytes(share.bytes).str(),
                        share.seconds * 1e3);
  }
  if (static_cast<int>(rows.size()) > limit) {
    text += fmt::format("  ... and {} more\n", static_cast<int>(rows.size()) - limit);
  }
  return text;
}

// The kinds that are alive at the peak, in words, the largest first.
std::vector<std::pair<int64_t, std::string>> kinds_of(const AtPeak& peak) {
  const std::array<std::string, AtPeak::kKinds> names = {
      peak.runs.empty() ? "in use" : "operands, results and workspace of " + peak.runs,
      "computed again, for a later operator",
      "kept for backward",
      "held by the program, for a later operator",
      "held by the program after their last use",
      "gradients of results",
      "gradients of parameters",
      "in no operator's result"};
  std::vector<std::pair<int64_t, std::string>> kinds;
  for (size_t kind = 0; kind < names.size(); ++kind) {
    if (peak.bytes[kind] > 0) {
      kinds.emplace_back(peak.bytes[kind], names[kind]);
    }
  }
  std::stable_sort(kinds.begin(), kinds.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  return kinds;
}

// Storages that leave, by the operator that makes them, with the seconds of the transfers out and back.
std::map<std::string, Share> transfers(const Simulator& simulator, const Simulation& run) {
  const Profile& profile = simulator.profile();
  std::map<std::string, Share> moved;
  const auto share_of = [&](int s) -> Share& {
    const int op = simulator.producer({s, 0});
    return moved[op < 0 ? "?" : profile.operators[static_cast<size_t>(op)].name];
  };
  const auto bytes_of = [&](int s) { return profile.storages[static_cast<size_t>(s)].bytes; };
  for (const int s : run.offloaded) {
    Share& share = share_of(s);
    ++share.count;
    share.bytes += bytes_of(s);
    share.seconds += profile.link.out_seconds(bytes_of(s));
  }
  for (const Replay& replay : run.replays) {
    for (const int s : replay.loads) {
      share_of(s).seconds += profile.link.back_seconds(bytes_of(s));
    }
  }
  return moved;
}

}  // namespace

std::string Solution::to_json() const {
  return detail::versioned_json(kPlanJson, {{"hold_from", numbers_of(stays)},
                                            {"peak_bytes", peak_bytes},
                                            {"seconds", seconds},
                                            {"plain_peak_bytes", plain_peak_bytes},
                                            {"plain_seconds", plain_seconds},
                                            {"bound_seconds", bound_seconds}})
      .dump();
}

Solution Solution::from_json(std::string_view text) {
  return detail::read_versioned_json(kPlanJson, text, [](const Json& json) {
    return Solution{.stays = stays_of(numbers_in(json.at("hold_from"))),
                    .peak_bytes = detail::whole_number<int64_t>(json.at("peak_bytes")),
                    .seconds = json.at("seconds").get<double>(),
                    .plain_peak_bytes = detail::whole_number<int64_t>(json.at("plain_peak_bytes")),
                    .plain_seconds = json.at("plain_seconds").get<double>(),
                    .bound_seconds = json.at("bound_seconds").get<double>()};
  });
}

std::string explain(const Simulator& simulator, const Solution& plan, int rows) {
  const Profile& profile = simulator.profile();
  const Simulation run = simulator.run(plan.stays);
  if (run.impossible >= 0) {
    throw ConfigError(
        fmt::format("explain: the plan drops storage {}, which nothing can rebuild; it belongs to another profile",
                    run.impossible));
  }
  std::map<std::string, Share> replayed;
  std::map<std::string, Share> alive;
  for (const Replay& replay : run.replays) {
    for (const int index : replay.operators) {
      const Operator& op = profile.operators[static_cast<size_t>(index)];
      Share& share = replayed[op.name];
      ++share.count;
      share.seconds += op.seconds;
      for (const Value& value : op.writes) {
        share.bytes += value.version == 0 ? profile.storages[static_cast<size_t>(value.storage)].bytes : 0;
      }
    }
  }
  const AtPeak peak = simulator.at_peak(plan.stays);
  for (const int s : peak.storages) {
    const int op = simulator.producer({s, 0});
    Share& share = alive[op < 0 ? "?" : profile.operators[static_cast<size_t>(op)].name];
    ++share.count;
    share.bytes += profile.storages[static_cast<size_t>(s)].bytes;
  }
  std::string text = fmt::format(
      "peak {} instead of {} ({:.1f} %), {:.3f} ms instead of {:.3f} ms ({:+.1f} %); at most {:.1f} % slower than the "
      "best possible plan\n",
      Bytes(run.peak_bytes).str(), Bytes(plan.plain_peak_bytes).str(),
      100.0 * static_cast<double>(run.peak_bytes) / static_cast<double>(std::max<int64_t>(1, plan.plain_peak_bytes)),
      run.seconds * 1e3, plan.plain_seconds * 1e3,
      plan.plain_seconds > 0 ? 100 * (run.seconds / plan.plain_seconds - 1) : 0.0, 100 * plan.gap());
  const auto less_time = [](const Share& a, const Share& b) { return a.seconds < b.seconds; };
  text += "rebuilt:\n" + table(sorted(replayed, less_time), rows);
  if (!run.offloaded.empty()) {
    text += fmt::format("goes to {}:\n", profile.link.kind == OffloadLink::Kind::File ? "disk" : "host memory");
    text += table(sorted(transfers(simulator, run), less_time), rows);
  }
  text += fmt::format("alive at the peak (event {} of {}):\n", run.peak_event, profile.events.size());
  for (const auto& [bytes, kind] : kinds_of(peak)) {
    text += fmt::format("  {:>12} {}\n", Bytes(bytes).str(), kind);
  }
  text += "results of operators among them:\n";
  text += table(sorted(alive, [](const Share& a, const Share& b) { return a.bytes < b.bytes; }), rows);
  return text;
}

std::string sentence(const AtPeak& peak, int64_t beside) {
  constexpr size_t kMost = 3;
  const int64_t all = std::accumulate(peak.bytes.begin(), peak.bytes.end(), int64_t{0});
  std::vector<std::pair<int64_t, std::string>> kinds = kinds_of(peak);
  int64_t rest = 0;
  for (; kinds.size() > kMost || (kinds.size() > 1 && kinds.back().first < all / 100); kinds.pop_back()) {
    rest += kinds.back().first;
  }
  if (beside > 0) {
    kinds.insert(kinds.begin(), {beside, "of weights, optimizer state, batch and gradients that are alive already"});
  }
  std::string text = "at the peak of the smallest plan are alive";
  for (size_t i = 0; i < kinds.size(); ++i) {
    text += fmt::format("{} {} {}", i == 0 ? "" : ",", Bytes(kinds[i].first).str(), kinds[i].second);
  }
  text += rest > 0 ? fmt::format(", and {} else", Bytes(rest).str()) : "";
  if (peak.bytes[AtPeak::HeldIdle] > all / 10) {
    text +=
        "; the program can release its part: a named tensor lives until its scope ends or the name is assigned again, "
        "and the temporaries of an expression until its semicolon";
  }
  return text;
}

}  // namespace snug::plan
