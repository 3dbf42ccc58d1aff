#include "snug/distributed/process_group.h"

#include <csignal>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <sstream>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "src/distributed/launch_environment.h"
#include "tests/distributed/ranks.h"
#include "tests/support/tensors.h"

namespace snug::process_group_test {
namespace {

using detail::Environment;
using ::testing::AllOf;
using ::testing::AnyOf;
using testing::error_of;
using testing::free_port;
using ::testing::HasSubstr;
using testing::is_rank;
using testing::on_ranks;
using testing::quick;
using testing::TakenPort;
using testing::this_rank;

constexpr auto kSoon = std::chrono::milliseconds(1500);

TEST(ProcessGroup, AloneIsAGroupOfOne) {
  const auto group = init_process_group({.environment = Environment{}});
  EXPECT_EQ(group->rank(), 0);
  EXPECT_EQ(group->size(), 1);
  const auto x = torch::full({3}, 2.0F);
  group->all_reduce(x);
  group->broadcast({x});
  group->barrier();
  EXPECT_TRUE(torch::equal(group->all_gather(x), torch::full({1, 3}, 2.0F)));
  EXPECT_TRUE(torch::equal(group->reduce_scatter(x), x));
}

TEST(ProcessGroup, DoesWhatItSaysOnThreeRanks) {
  on_ranks(3, [] {
    const auto group = init_process_group(quick());
    ASSERT_EQ(group->size(), 3);
    ASSERT_EQ(group->rank(), this_rank());
    EXPECT_EQ(group->local_rank(), this_rank());
    const auto rank = static_cast<float>(group->rank());
    const auto sum = torch::full({2}, rank);
    group->all_reduce(sum);
    EXPECT_TRUE(torch::equal(sum, torch::full({2}, 3.0F)));
    const auto largest = torch::full({2}, rank);
    group->all_reduce(largest, ReduceOp::Max);
    EXPECT_TRUE(torch::equal(largest, torch::full({2}, 2.0F)));
    const auto sent = torch::full({2}, rank);
    group->broadcast({sent, torch::zeros({5}, torch::kLong)}, 1);
    EXPECT_TRUE(torch::equal(sent, torch::full({2}, 1.0F)));
    const auto all = group->all_gather(torch::full({2}, rank));
    EXPECT_TRUE(torch::equal(all, torch::arange(3.0F).unsqueeze(1).expand({3, 2})));
    EXPECT_TRUE(torch::equal(group->reduce_scatter(torch::arange(6.0F)),
                             torch::arange(6.0F).slice(0, 2 * group->rank(), 2 * group->rank() + 2) * 3));
    group->barrier();
    EXPECT_EQ(group->traffic().all_reduce, 16);
    EXPECT_EQ(group->traffic().broadcast, 48);
    EXPECT_EQ(group->traffic().all_gather, 8);
    EXPECT_EQ(group->traffic().reduce_scatter, 24);
  });
}

std::set<std::string> threads() {
  std::set<std::string> found;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task")) {
    found.insert(thread.path().filename());
  }
  return found;
}

// None: the thread is gone.
std::optional<bool> blocks_sigpipe(const std::string& thread) {
  std::ifstream status("/proc/self/task/" + thread + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("SigBlk:")) {
      return (std::stoull(line.substr(7), nullptr, 16) >> (SIGPIPE - 1) & 1U) != 0;
    }
  }
  return std::nullopt;
}

// Else a write to a rank that has died ends the process. That Gloo is at that moment about to write cannot be arranged.
TEST(ProcessGroup, HasThreadsThatDoNotTakeSigpipe) {
  if (!std::filesystem::exists("/proc/self/task")) {
    GTEST_SKIP() << "needs /proc";
  }
  on_ranks(2, [] {
    const auto before = threads();
    const auto group = init_process_group(quick());
    group->barrier();
    size_t of_the_group = 0;
    for (const std::string& thread : threads()) {
      if (const std::optional<bool> blocks = blocks_sigpipe(thread)) {
        EXPECT_EQ(*blocks, !before.contains(thread)) << "thread " << thread;
        of_the_group += before.contains(thread) ? 0 : 1;
      }
    }
    EXPECT_GT(of_the_group, 0U);
    group->barrier();
  });
}

TEST(ProcessGroup, RefusesTensorsThatItCannotSend) {
  const auto group = init_process_group({.environment = Environment{}});
  EXPECT_THAT(error_of<ConfigError>([&] { group->all_reduce(torch::zeros({4, 4}).t()[0].expand({4, 4})); }),
              HasSubstr("not contiguous"));
  EXPECT_THAT(error_of<ConfigError>([&] { group->all_gather({}); }), HasSubstr("undefined"));
}

TEST(ProcessGroup, MeetsInAFile) {
  const testing::TemporaryFolder folder;
  on_ranks(2, {{{"STORE", folder / "store"}}, {{"STORE", folder / "store"}}}, 1, [] {
    auto options = quick();
    options.store = std::string("file://") + std::getenv("STORE");
    std::vector<std::shared_ptr<ProcessGroup>> groups;
    for (int i = 0; i < 2; ++i) {  // several, in the same file
      groups.push_back(init_process_group(options));
      const auto x = torch::ones({1});
      groups.back()->all_reduce(x);
      EXPECT_EQ(x.item<float>(), 2);
    }
  });
}

TEST(ProcessGroup, MayBeOneOfSeveralThatMeetAtOneAddress) {
  on_ranks(2, [] {
    std::vector<std::shared_ptr<ProcessGroup>> groups;
    for (int i = 0; i < 2; ++i) {
      groups.push_back(init_process_group(quick()));
    }
    for (const auto& group : groups) {
      const auto x = torch::ones({1});
      group->all_reduce(x);
      EXPECT_EQ(x.item<float>(), 2);
    }
    groups[0]->barrier();
    groups[0].reset();
    EXPECT_TRUE(torch::equal(groups[1]->all_gather(torch::ones({1})), torch::ones({2, 1})));
  });
}

TEST(ProcessGroup, MeetsAfterOneRankWasInAGroupOfItsOwn) {
  on_ranks(2, [] {
    if (this_rank() == 0) {
      init_process_group({.environment = Environment{}});
    }
    EXPECT_EQ(init_process_group(quick(kSoon))->size(), 2);
  });
}

// Ranks 0 and 1, and those who come instead of them when rank 1 was lost: 1 before rank 0 has noticed.
TEST(ProcessGroup, MeetsAgainThoughTheLastAttemptsStoreIsStillThere) {
  const testing::TemporaryFolder folder;
  std::vector<Environment> ranks;
  for (int i = 0; i < 4; ++i) {
    ranks.push_back({{"RANK", std::to_string(i % 2)},
                     {"WORLD_SIZE", "2"},
                     {"FOLDER", folder.path()},
                     {"TORCHELASTIC_RESTART_COUNT", std::to_string(i / 2)}});
  }
  on_ranks(4, ranks, is_rank() ? 0 : free_port(), [] {
    const std::filesystem::path shared = std::getenv("FOLDER");
    const auto tell = [&](const char* what) { std::ofstream(shared / what) << what; };
    const auto wait_for = [&](const char* what) {
      while (!std::filesystem::exists(shared / what)) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    };
    std::shared_ptr<ProcessGroup> group;
    switch (this_rank()) {
      case 0:
        group = init_process_group(quick());
        tell("met");
        wait_for("lost");
        std::this_thread::sleep_for(std::chrono::milliseconds(500));
        group.reset();
        std::this_thread::sleep_for(std::chrono::milliseconds(100));  // till its port is free
        tell("noticed");
        return;
      case 1:
        init_process_group(quick());
        return;
      case 2:
        wait_for("noticed");
        break;
      default:
        wait_for("met");
        tell("lost");
    }
    group = init_process_group(quick());
    const auto x = torch::ones({1});
    group->all_reduce(x);
    EXPECT_EQ(x.item<float>(), 2);
  });
}

// Rank 0 comes too early, is told so, and comes again; rank 1, which has not failed before, meets it.
void meet_in_a_second_attempt(const std::string& store) {
  const std::filesystem::path failed = std::getenv("FAILED");
  auto options = quick();
  options.store = store;
  if (this_rank() == 0) {
    auto early = options;
    early.timeout = kSoon;
    EXPECT_THAT(error_of<DistributedError>([&] { init_process_group(early); }), HasSubstr("1 of 2 ranks did not come"));
    std::ofstream(failed) << "yes";
  }
  while (!std::filesystem::exists(failed)) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  std::shared_ptr<ProcessGroup> group;
  for (int i = 0; i < 2 && !group; ++i) {  // in a store that is there still, the first attempt's fault is too
    try {
      group = init_process_group(options);
    } catch (const DistributedError& error) {
      EXPECT_THAT(error.what(), HasSubstr("1 of 2 ranks did not come"));
    }
  }
  ASSERT_NE(group, nullptr);
  const auto x = torch::ones({1});
  group->all_reduce(x);
  EXPECT_EQ(x.item<float>(), 2);
  const auto next = init_process_group(options);
  EXPECT_EQ(next->size(), 2) << "and the next group is the next for both";
  next->barrier();  // a rank that left now would break the connection that the other is still making
}

TEST(ProcessGroup, MeetsARankThatHasTriedBefore) {
  const testing::TemporaryFolder folder;
  on_ranks(2, std::vector<Environment>(2, {{"FAILED", folder / "failed"}}), is_rank() ? 0 : free_port(),
           [] { meet_in_a_second_attempt(""); });
}

TEST(ProcessGroup, MeetsInAFileARankThatHasTriedThereBefore) {
  const testing::TemporaryFolder folder;
  on_ranks(2, std::vector<Environment>(2, {{"FAILED", folder / "failed"}, {"STORE", folder / "store"}}), 1,
           [] { meet_in_a_second_attempt(std::string("file://") + std::getenv("STORE")); });
}

// Rank 1 sees that all are there, and then has no interface. Both learn of it and come again.
TEST(ProcessGroup, MeetsAgainInAFileWhereARankWasThereButNotConnected) {
  const testing::TemporaryFolder folder;
  on_ranks(2, std::vector<Environment>(2, {{"STORE", folder / "store"}}), 1, [] {
    auto options = quick();
    options.store = std::string("file://") + std::getenv("STORE");
    auto first = options;
    first.timeout = kSoon;
    if (this_rank() == 1) {
      first.interface = "nonsense7";
    }
    EXPECT_THAT(error_of<DistributedError>([&] { init_process_group(first); }), HasSubstr("cannot be connected"));
    const auto group = init_process_group(options);
    const auto x = torch::ones({1});
    group->all_reduce(x);
    EXPECT_EQ(x.item<float>(), 2);
  });
}

TEST(ProcessGroup, WaitsForEverWhereTheTimeoutIsLongerThanClocksCount) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick(std::chrono::milliseconds::max()));
    const auto x = torch::ones({1});
    group->all_reduce(x);
    EXPECT_EQ(x.item<float>(), 2);
  });
}

// The local addresses at which somebody listens on the port, as the kernel writes them.
std::vector<std::string> listeners_at(int port) {
  std::vector<std::string> found;
  const std::string suffix = fmt::format(":{:04X}", port);
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream lines(table);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string number, local, remote, state;
      words >> number >> local >> remote >> state;
      if (state == "0A" && local.ends_with(suffix)) {
        found.push_back(local.substr(0, local.size() - suffix.size()));
      }
    }
  }
  return found;
}

TEST(ProcessGroup, OfOneMachineCanBeReachedByNoOther) {
  if (!std::filesystem::exists("/proc/net/tcp")) {
    GTEST_SKIP() << "needs /proc/net";
  }
  for (const char* host : {"127.0.0.1", "localhost"}) {
    const int port = free_port();
    const auto make = [&] {
      return init_process_group({.store = fmt::format("tcp://{}:{}", host, port), .rank = 0, .size = 1});
    };
    const auto group = make();
    EXPECT_THAT(listeners_at(port), ::testing::ElementsAre("0100007F")) << host;
    const auto another = make();
    EXPECT_THAT(listeners_at(port), ::testing::ElementsAre("0100007F")) << host;
  }
}

TEST(ProcessGroup, NamesTheRanksThatDoNotCome) {
  on_ranks(2, {{{"WORLD_SIZE", "4"}}, {{"WORLD_SIZE", "4"}}}, free_port(), [] {
    EXPECT_THAT(error_of<DistributedError>([] { init_process_group(quick(kSoon)); }),
                AllOf(HasSubstr("2 of 4 ranks did not come"), HasSubstr("within 1.5 s: 2, 3")));
  });
}

// Two jobs whose users chose the same port: the second, of token `other`, does not disturb the first.
void expect_another_job_is_refused(const char* other) {
  const testing::TemporaryFolder folder;
  std::vector<Environment> extra(
      3, Environment{{"WORLD_SIZE", "2"}, {"SNUG_JOB_TOKEN", "one"}, {"GONE", folder / "gone"}});
  extra[2]["RANK"] = "1";
  extra[2]["SNUG_JOB_TOKEN"] = other;
  on_ranks(3, extra, free_port(), [] {
    const std::filesystem::path gone = std::getenv("GONE");
    if (this_rank() == 2) {
      EXPECT_THAT(error_of<DistributedError>([] { init_process_group(quick()); }),
                  AllOf(HasSubstr("of another job than this rank 1"), HasSubstr("SNUG_JOB_TOKEN")));
      std::ofstream file(gone);
      return;
    }
    const auto group = init_process_group(quick());
    const auto x = torch::ones({1});
    group->all_reduce(x);
    EXPECT_EQ(x.item<float>(), 2);
    while (!std::filesystem::exists(gone)) {  // the store ends with rank 0
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  });
}

TEST(ProcessGroup, DoesNotMeetARankOfAnotherJob) { expect_another_job_is_refused("other"); }
TEST(ProcessGroup, DoesNotMeetARankOfAJobWithoutAToken) { expect_another_job_is_refused(""); }

TEST(ProcessGroup, MeetsInAFileThatAnotherJobUses) {
  const testing::TemporaryFolder folder;
  on_ranks(2, {{{"STORE", folder / "store"}}, {{"STORE", folder / "store"}}}, 1, [] {
    std::vector<std::shared_ptr<ProcessGroup>> groups;  // the last one that leaves removes the file
    for (const char* token : {"one", "another", ""}) {
      ProcessGroupOptions options = quick();
      options.store = std::string("file://") + std::getenv("STORE");
      options.token = token;
      groups.push_back(init_process_group(options));
      const auto x = torch::ones({1});
      groups.back()->all_reduce(x);
      EXPECT_EQ(x.item<float>(), 2);
    }
  });
}

TEST(ProcessGroup, MeetsWhoHasItsTokenFromTheOptionsOrTheVariable) {
  on_ranks(2, {{{"SNUG_JOB_TOKEN", "one"}}, {}}, free_port(), [] {
    ProcessGroupOptions options = quick();
    options.token = this_rank() == 0 ? "" : "one";
    const auto group = init_process_group(options);
    const auto x = torch::ones({1});
    group->all_reduce(x);
    EXPECT_EQ(x.item<float>(), 2);
  });
}

TEST(ProcessGroup, SaysThatRanksDisagreeOnTheirNumber) {
  on_ranks(2, {{}, {{"WORLD_SIZE", "3"}}}, free_port(), [] {
    EXPECT_THAT(error_of<DistributedError>([] { init_process_group(quick(kSoon)); }),
                AllOf(HasSubstr("ranks"), HasSubstr("2"), HasSubstr("3"), HasSubstr("same number")));
  });
}

TEST(ProcessGroup, SaysThatARankIsThereTwice) {
  on_ranks(3, {{{"WORLD_SIZE", "3"}}, {}, {{"RANK", "1"}}}, free_port(), [] {
    EXPECT_THAT(error_of<DistributedError>([] { init_process_group(quick(kSoon)); }),
                HasSubstr("rank 1 is at tcp://127.0.0.1"));
  });
}

TEST(ProcessGroup, SaysThatThePortIsInUse) {
  std::optional<TakenPort> taken;
  if (!is_rank()) {
    taken.emplace();
  }
  on_ranks(2, {}, taken ? taken->port() : 0, [] {
    const auto start = std::chrono::steady_clock::now();
    EXPECT_THAT(error_of<DistributedError>([] { init_process_group(quick(kSoon)); }),
                HasSubstr(this_rank() == 0 ? "is the port in use by another job?" : "is rank 0 running"));
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  });
}

TEST(ProcessGroup, SaysThatNobodyListens) {
  on_ranks(1, {{{"RANK", "1"}, {"WORLD_SIZE", "2"}}}, free_port(), [] {
    EXPECT_THAT(error_of<DistributedError>([] { init_process_group(quick(kSoon)); }),
                AllOf(HasSubstr("rank 1 cannot reach rank 0 at tcp://127.0.0.1"), HasSubstr("is rank 0 running")));
  });
}

TEST(ProcessGroup, SaysThatTheInterfaceIsUnknown) {
  EXPECT_THAT(
      error_of<DistributedError>([] { init_process_group({.interface = "nonsense7", .environment = Environment{}}); }),
      HasSubstr("'nonsense7'"));
}

TEST(ProcessGroup, RefusesOptionsThatCannotWork) {
  const auto error = [](ProcessGroupOptions options) {
    options.environment = Environment{};
    return error_of<ConfigError>([&] { init_process_group(options); });
  };
  EXPECT_THAT(error({.rank = 0}), HasSubstr("only one is given"));
  EXPECT_THAT(error({.rank = 2, .size = 2}), HasSubstr("rank is 2 and size is 2"));
  EXPECT_THAT(error({.rank = 0, .size = 2}), HasSubstr("MASTER_ADDR"));
  EXPECT_THAT(error({.timeout = std::chrono::milliseconds(0)}), HasSubstr("timeout is 0 ms"));
  for (const char* store : {"host:1", "tcp://host", "tcp://host:", "tcp://host:99999", "tcp://:1", "file://"}) {
    EXPECT_THAT(error({.store = store}), HasSubstr(store));
  }
}

}  // namespace
}  // namespace snug::process_group_test
