// The time that a Stepper's planning spends in searches, without LibTorch and without training. A batch of 16 and its
// halves, each with the profile of a GPT, go through the searches in a Stepper's order. Prints the choice, its
// predicted time and peak, and the processor's seconds.
//
// usage: planning                    GPTs of 12, 24 and 48 blocks, in 0.3 and 0.06 of the batch's plain bytes
//        planning ITEMS:FILE...      the same for profiles of one's own, from the batch down to the smallest part
//        planning --plans            a line for each of many single plans, to compare two versions of the planner

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <iterator>
#include <list>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "src/planner/search.h"
#include "tests/planner/sample_profiles.h"

namespace {

using snug::OffloadLink;
using snug::plan::Answer;
using snug::plan::Candidate;
using snug::plan::Infeasible;
using snug::plan::Profile;
using snug::plan::Simulator;
using snug::plan::Solution;
using snug::plan::Solver;

struct MicroBatch {
  int64_t items;
  Profile profile;
};

double processor_seconds() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

int64_t plain_peak(const Simulator& simulator) {
  return simulator.run(snug::plan::keep_all(simulator.profile())).peak_bytes;
}

int64_t share_of(int64_t bytes, double share) { return static_cast<int64_t>(static_cast<double>(bytes) * share); }

// `items` of the batch: bytes in proportion, and a little more time for each item.
Profile part_of(Profile profile, int64_t items, int64_t batch) {
  const double part = static_cast<double>(items) / static_cast<double>(batch);
  const double slower = items == batch ? 1 : 1.02;
  const auto scaled = [&](int64_t bytes) { return (share_of(bytes, part) + 511) / 512 * 512; };
  for (auto& storage : profile.storages) {
    storage.bytes = storage.kind == snug::plan::StorageKind::External ? storage.bytes : scaled(storage.bytes);
  }
  for (auto& event : profile.events) {
    event.bytes = scaled(event.bytes);
  }
  for (auto& op : profile.operators) {
    op.workspace = scaled(op.workspace);
    op.seconds *= part * slower;
  }
  for (auto& step : profile.backward) {
    step.seconds *= part * slower;
  }
  return profile;
}

std::vector<MicroBatch> gpt(int blocks) {
  constexpr int64_t kBatch = 16;
  std::vector<MicroBatch> result;
  for (int64_t items = kBatch; items >= 1; items /= 2) {
    result.push_back({items, part_of(snug::testing::gpt_profile(blocks), items, kBatch)});
  }
  return result;
}

OffloadLink open_link() { return {.out_bytes_per_second = 3e8, .back_bytes_per_second = 6e8, .seconds = 1e-5}; }

Profile read(const std::string& file) {
  std::ifstream stream(file);
  return Profile::from_json(std::string(std::istreambuf_iterator<char>(stream), {}));
}

// --- the searches of a Stepper

// The searches for schedules under which a profile is taken (remat/profile_step.cpp). Whether the micro-batch
// runs.
bool runs_under_a_guess(const MicroBatch& one, int64_t budget) {
  const Simulator simulator(one.profile);
  if (plain_peak(simulator) <= budget) {
    return true;
  }
  Solver quick(simulator, {.work = 30'000});
  const Answer answer = quick.solve(0);
  const auto* none = std::get_if<Infeasible>(&answer);
  const int64_t least = none == nullptr ? 0 : none->smallest_feasible_bytes;
  for (const int64_t quarters : {8, 5, 4}) {
    if (std::get<Solution>(quick.solve(least / 4 * quarters + least % 4)).peak_bytes <= budget) {
      return true;
    }
  }
  Solver thorough(simulator, {.work = 2'000'000});
  return (one.items == 1 ? thorough : quick).smallest().peak_bytes <= budget;
}

// A micro-batch that runs, with the plans of its searches.
struct Tried {
  explicit Tried(const MicroBatch& one) : items(one.items), simulator(one.profile), solver(simulator) {}
  int64_t items;
  Simulator simulator;
  Solver solver;
};

// As step/step_trials.cpp: micro-batches are tried down to the first that fits plainly, or to the sixth if one of six
// fits.
void plan(const std::string& name, const std::vector<MicroBatch>& all, double share) {
  constexpr size_t kCandidates = 6;
  const double begin = processor_seconds();
  const Simulator whole(all.front().profile);
  const double plain = whole.run(snug::plan::keep_all(whole.profile())).seconds;
  const int64_t batch = all.front().items, budget = share_of(plain_peak(whole), share);
  double guessing = 0;
  std::list<Tried> tried;
  const auto search = [&] {
    std::vector<Candidate> candidates;
    for (Tried& one : tried) {
      candidates.push_back({.items = one.items, .simulator = &one.simulator, .solver = &one.solver});
    }
    return tried.empty() ? snug::plan::Search{} : snug::plan::search(candidates, {.batch = batch, .budget = budget});
  };
  for (size_t i = 0; i < all.size(); ++i) {
    const double before = processor_seconds();
    const bool has_run = runs_under_a_guess(all[i], budget);
    guessing += processor_seconds() - before;
    if (has_run) {
      tried.emplace_back(all[i]);
    }
    if ((has_run && plain_peak(tried.back().simulator) <= budget) || (i + 1 >= kCandidates && search().choice)) {
      break;
    }
  }
  const snug::plan::Search found = search();
  std::printf("%-20s %5.2f   ", name.c_str(), share);
  if (found.choice) {
    std::printf("%3lld items, %7.5f of plain, peak %.4f", static_cast<long long>(found.choice->items),
                found.choice->seconds / plain,
                static_cast<double>(found.choice->peak_bytes) / static_cast<double>(budget));
  } else {
    std::printf("%-37s", "nothing fits");
  }
  std::printf("   %6.2f s, guesses %5.2f s\n", processor_seconds() - begin, guessing);
  std::fflush(stdout);
}

// --- single plans

void print_plans(const std::string& name, const Profile& profile, int64_t work) {
  const Simulator simulator(profile);
  const int64_t plain = plain_peak(simulator);
  for (const double share : {0.9, 0.7, 0.5, 0.35, 0.25, 0.18, 0.12, 0.08}) {
    const double begin = processor_seconds();
    Solver solver(simulator, {.work = work});
    const Answer answer = solver.solve(share_of(plain, share));
    const auto* found = std::get_if<Solution>(&answer);
    const double peak = static_cast<double>(found != nullptr ? found->peak_bytes
                                                             : std::get<Infeasible>(answer).smallest_feasible_bytes) /
                        static_cast<double>(plain);
    std::printf("%-20s %5.2f   %8.5f of plain, peak %.5f   %6.3f s, %lld simulations\n", name.c_str(), share,
                found != nullptr ? found->seconds / found->plain_seconds : 0.0, peak, processor_seconds() - begin,
                static_cast<long long>(solver.simulations()));
    std::fflush(stdout);
  }
}

void print_all_plans() {
  constexpr int64_t kWork = snug::plan::SolverOptions{}.work;
  for (uint32_t seed = 0; seed < 60; ++seed) {
    Profile profile = snug::testing::random_profile(seed, 20 + static_cast<int>(seed) * 3);
    if (seed % 3 == 2) {
      profile.link = {.out_bytes_per_second = 1e5, .back_bytes_per_second = 2e5, .seconds = 1e-4};
    }
    print_plans("random " + std::to_string(seed), profile, 500'000);
  }
  for (const int blocks : {4, 12, 24, 48}) {
    Profile profile = snug::testing::gpt_profile(blocks);
    print_plans("gpt " + std::to_string(blocks), profile, kWork);
    profile.link = open_link();
    print_plans("gpt " + std::to_string(blocks) + ", link", profile, kWork);
  }
  print_plans("chain 300", snug::testing::deep_chain(300), kWork);
}

}  // namespace

int main(int count, char** arguments) {
  if (count == 2 && std::string_view(arguments[1]) == "--plans") {
    print_all_plans();
    return 0;
  }
  std::vector<MicroBatch> own;
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    own.push_back({std::atoll(argument.c_str()), read(argument.substr(argument.find(':') + 1))});
  }
  if (!own.empty()) {
    for (const double share : {0.3, 0.06}) {
      plan("profiles", own, share);
    }
    return 0;
  }
  for (const int blocks : {12, 24, 48}) {
    std::vector<MicroBatch> all = gpt(blocks);
    for (const bool has_link : {false, true}) {
      for (MicroBatch& one : all) {
        one.profile.link = has_link ? open_link() : OffloadLink{};
      }
      for (const double share : {1.0, 0.3, 0.06}) {
        plan("gpt " + std::to_string(blocks) + (has_link ? ", link" : ""), all, share);
      }
    }
  }
  return 0;
}
