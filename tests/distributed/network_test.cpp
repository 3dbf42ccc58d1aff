// Ranks on both ends of a slow link: network namespaces, joined by a pair of virtual interfaces whose speed `tc`
// limits. Skipped where that is not permitted.

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <torch/torch.h>
#include <unistd.h>

#include "snug/core.h"
#include "snug/distributed/data_parallel.h"
#include "src/distributed/launch_environment.h"
#include "tests/distributed/ranks.h"
#include "tests/support/tensors.h"

namespace snug::network_test {
namespace {

using detail::Environment;
using testing::bytes_of;
using testing::is_rank;
using testing::on_ranks;
using testing::this_rank;
using Clock = std::chrono::steady_clock;

constexpr double kBytesPerSecond = 5e6;  // 40 Mbit/s

bool runs(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Two namespaces and the link between them, until the end of the scope. Made by the parent of the ranks.
class SlowLink {
 public:
  SlowLink() {
    is_there_ = runs("ip netns add " + name(0)) && runs("ip netns add " + name(1)) &&
                runs("ip -n " + name(0) + " link add eth0 type veth peer name eth0 netns " + name(1));
    for (int end = 0; is_there_ && end < 2; ++end) {
      const std::string here = "-n " + name(end);
      is_there_ = runs("ip " + here + " addr add 10.98.6." + std::to_string(end + 1) + "/24 dev eth0") &&
                  runs("ip " + here + " link set eth0 up") && runs("ip " + here + " link set lo up") &&
                  runs("tc " + here + " qdisc add dev eth0 root tbf rate 40mbit burst 16kb latency 200ms");
    }
  }
  ~SlowLink() {
    runs("ip netns del " + name(0));
    runs("ip netns del " + name(1));
  }
  SlowLink(const SlowLink&) = delete;
  SlowLink& operator=(const SlowLink&) = delete;

  bool is_there() const { return is_there_; }
  static std::vector<Environment> variables() {
    return {{{"TEST_NETWORK", name(0)}, {"MASTER_ADDR", "10.98.6.1"}},
            {{"TEST_NETWORK", name(1)}, {"MASTER_ADDR", "10.98.6.1"}}};
  }

 private:
  static std::string name(int end) { return "snug-test-" + std::to_string(::getpid()) + "-" + std::to_string(end); }
  bool is_there_;
};

// In a rank: to its end of the link.
std::shared_ptr<ProcessGroup> meet_over_the_link(std::chrono::milliseconds timeout) {
  const int file = ::open((std::string("/run/netns/") + std::getenv("TEST_NETWORK")).c_str(), O_RDONLY);
  EXPECT_EQ(::setns(file, CLONE_NEWNET), 0);
  ::close(file);
  return init_process_group({.timeout = timeout, .interface = "eth0"});
}

template <class Body>
void on_both_ends(Body&& body) {
  std::optional<SlowLink> link;
  if (!is_rank()) {
    link.emplace();
    if (!link->is_there()) {
      GTEST_SKIP() << "needs the right to make network namespaces, with ip and tc";
    }
  }
  on_ranks(2, link ? SlowLink::variables() : std::vector<Environment>{}, 29518, body);
}

// What this rank has put on the wire so far, headers included.
int64_t bytes_on_the_wire() {
  std::ifstream file("/proc/thread-self/net/dev");
  std::string line;
  while (std::getline(file, line)) {
    if (line.find("eth0:") != std::string::npos) {
      std::istringstream fields(line.substr(line.find(':') + 1));
      int64_t value = 0;
      for (int i = 0; i < 9; ++i) {
        fields >> value;
      }
      return value;
    }
  }
  return -1;
}

// A step of 4 micro-batches: `bytes` is what the model says that each of 2 ranks sends in a ring: once the gradients
// for each all-reduce.
void expect_step(const std::shared_ptr<ProcessGroup>& group, const CommHook& hook, int loud,
                 int64_t (*bytes)(int64_t)) {
  torch::nn::Linear model(256, 512);
  DataParallel ddp(model, group, {.hook = hook});
  const auto x = torch::ones({2, 256});
  const auto step = [&] {
    for (int i = 0; i < 4; ++i) {
      std::optional<NoSync> quiet;
      if (i < 4 - loud) {
        quiet.emplace(ddp);
      }
      ddp.forward([&] { return model->forward(x).square().mean(); }).backward();
    }
  };
  const auto expected = static_cast<double>(bytes(bytes_of(model->parameters())));
  group->barrier();
  const int64_t before = bytes_on_the_wire();
  const auto start = Clock::now();
  step();
  const double seconds = seconds_since(start);
  group->barrier();  // what the other end has not received yet may still wait at this one
  const auto sent = static_cast<double>(bytes_on_the_wire() - before);
  EXPECT_GT(sent, 0.99 * expected);
  EXPECT_LT(sent, 1.2 * expected);
  // No sooner than the link allows, but for what it lets pass at once.
  EXPECT_GT(seconds, 0.8 * expected / kBytesPerSecond);
}

TEST(SlowNetwork, IsUsedAsTheModelSays) {
  on_both_ends([] {
    const auto group = meet_over_the_link(std::chrono::seconds(30));
    expect_step(group, {}, 4, [](int64_t gradients) { return 4 * gradients; });
    expect_step(group, {}, 1, [](int64_t gradients) { return gradients; });
    expect_step(group, bfloat16_hook(), 1, [](int64_t gradients) { return gradients / 2; });
  });
}

TEST(SlowNetwork, IsAnErrorWithinTheTimeoutWhenTheLinkIsCut) {
  on_both_ends([] {
    const auto group = meet_over_the_link(std::chrono::seconds(3));
    const auto x = torch::ones({4});
    group->all_reduce(x);
    EXPECT_EQ(x[0].item<float>(), 2);
    if (this_rank() == 0) {
      EXPECT_TRUE(runs("ip link set eth0 down"));
    }
    const auto start = Clock::now();
    EXPECT_THROW(
        {
          for (int i = 0; i < 100; ++i) {  // the other's first may have come through before the cut
            group->all_reduce(torch::ones({100000}));
          }
        },
        DistributedError);
    EXPECT_LT(seconds_since(start), 20);
  });
}

}  // namespace
}  // namespace snug::network_test
