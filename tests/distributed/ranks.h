#pragma once
// Tests with several ranks: the test program starts itself once per rank, with torchrun's variables, to run the same
// test.
//
//   TEST(Group, AddsUp) {
//     on_ranks(2, [] {
//       const auto group = init_process_group(quick());
//       ...                                     // on each rank, in a process of its own; EXPECT_ as usual
//     });
//   }
//
// The parent fails, and shows what they wrote, if a rank fails, crashes or takes too long.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include "snug/distributed/process_group.h"
#include "src/distributed/launch_environment.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/temporary_folder.h"

namespace snug::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr auto kRanksTakeAtMost = std::chrono::minutes(10);  // the search for leaks at their ends takes long
constexpr auto kRanksWaitAtMost = std::chrono::minutes(5);   // planning is many times slower
#else
constexpr auto kRanksTakeAtMost = std::chrono::seconds(60);
constexpr auto kRanksWaitAtMost = std::chrono::seconds(20);
#endif

inline bool is_rank() { return std::getenv("SNUG_TEST_RANK") != nullptr; }
/// A folder of all ranks of the test.
inline std::filesystem::path shared_folder() { return std::getenv("SNUG_TEST_FOLDER"); }
inline int this_rank() { return std::atoi(std::getenv("SNUG_TEST_RANK")); }

/// Loopback, and a timeout that ends a test whose ranks hang.
inline ProcessGroupOptions quick(std::chrono::milliseconds timeout = kRanksWaitAtMost) {
  return {.timeout = timeout, .interface = "lo"};
}

/// A listening socket on a free port, until the end of the scope.
class TakenPort {
 public:
  TakenPort() : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_ANY);
    socklen_t length = sizeof(address);
    ::bind(socket_, reinterpret_cast<sockaddr*>(&address), length);
    ::listen(socket_, 8);
    ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &length);
    port_ = ntohs(address.sin_port);
  }
  ~TakenPort() { ::close(socket_); }
  TakenPort(const TakenPort&) = delete;
  TakenPort& operator=(const TakenPort&) = delete;
  int port() const { return port_; }

 private:
  int socket_;
  int port_ = 0;
};

inline int free_port() { return TakenPort().port(); }

namespace ranks_detail {

inline pid_t start(const std::vector<std::string>& arguments, const detail::Environment& variables,
                   const std::filesystem::path& output) {
  std::vector<std::string> entries;
  for (const auto& [name, value] : variables) {
    entries.push_back(name + "=" + value);
  }
  std::vector<char*> argv;
  std::vector<char*> envp;
  for (const auto& text : arguments) {
    argv.push_back(const_cast<char*>(text.c_str()));
  }
  for (const auto& text : entries) {
    envp.push_back(const_cast<char*>(text.c_str()));
  }
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    const int file = ::open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ::dup2(file, 1);
    ::dup2(file, 2);
    ::execve("/proc/self/exe", argv.data(), envp.data());
    ::_exit(127);
  }
  return child;
}

// The exit status; or minus the signal that ended it.
inline int wait_for(pid_t child, std::chrono::steady_clock::time_point deadline) {
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (std::chrono::steady_clock::now() > deadline) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      return -SIGKILL;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

inline std::string read(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace ranks_detail

/// What a rank's variables are, beside the parent's. `extra` come last.
inline detail::Environment rank_variables(int rank, int size, int port, const detail::Environment& extra = {}) {
  detail::Environment variables = detail::process_environment();
  for (const auto& [name, value] : detail::Environment{{"RANK", std::to_string(rank)},
                                                       {"LOCAL_RANK", std::to_string(rank)},
                                                       {"WORLD_SIZE", std::to_string(size)},
                                                       {"MASTER_ADDR", "127.0.0.1"},
                                                       {"MASTER_PORT", std::to_string(port)},
                                                       {"OMP_NUM_THREADS", "1"},
                                                       {"SNUG_TEST_RANK", std::to_string(rank)}}) {
    variables[name] = value;
  }
  for (const auto& [name, value] : extra) {
    variables[name] = value;
  }
  return variables;
}

/// In a rank: runs `body`. In the parent: starts this very test on `size` ranks, `extra[rank]` added to their
/// variables.
template <class Body>
void on_ranks(int size, const std::vector<detail::Environment>& extra, int port, Body&& body) {
  if (is_rank()) {
    body();
    return;
  }
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  const std::vector<std::string> arguments = {
      "rank", fmt::format("--gtest_filter={}.{}", test->test_suite_name(), test->name()), "--gtest_brief=1"};
  const TemporaryFolder folder, shared;
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    detail::Environment more = extra.empty() ? detail::Environment{} : extra[static_cast<size_t>(rank)];
    more["SNUG_TEST_FOLDER"] = shared.path();
    children.push_back(
        ranks_detail::start(arguments, rank_variables(rank, size, port, more), folder / std::to_string(rank)));
  }
  const auto deadline = std::chrono::steady_clock::now() + kRanksTakeAtMost;
  for (int rank = 0; rank < size; ++rank) {
    const int status = ranks_detail::wait_for(children[static_cast<size_t>(rank)], deadline);
    EXPECT_EQ(status, 0) << "rank " << rank
                         << (status < 0
                                 ? fmt::format(" was ended by signal {} (9: perhaps it took too long); it wrote\n",
                                               -status)
                                 : " wrote\n")
                         << ranks_detail::read(folder / std::to_string(rank));
  }
}

template <class Body>
void on_ranks(int size, Body&& body) {
  on_ranks(size, {}, is_rank() ? 0 : free_port(), std::forward<Body>(body));
}

inline bool is_true_on_any(ProcessGroup& group, bool own) {
  auto any = torch::full({1}, own ? 1 : 0, torch::kLong);
  group.all_reduce(any);
  return any.item<int64_t>() > 0;
}

/// What each rank says, in their order.
inline std::vector<int64_t> of_all_ranks(ProcessGroup& group, int64_t own) {
  const auto all = group.all_gather(torch::full({1}, own, torch::kLong)).flatten();
  return {all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel()};
}
inline bool is_same_on_all(ProcessGroup& group, int64_t own) {
  const auto all = of_all_ranks(group, own);
  return std::all_of(all.begin(), all.end(), [&](int64_t value) { return value == own; });
}

/// The sweep in which an allocation of rank 1 fails. All ranks make the same rounds.
inline AllocationSweep on_rank_1(ProcessGroup& group, AllocationSweep sweep = {}) {
  sweep.fails_here = group.rank() == 1;
  sweep.anywhere = [&group](bool failed) { return is_true_on_any(group, failed); };
  return sweep;
}

}  // namespace snug::testing
