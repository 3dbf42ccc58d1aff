// Data parallelism: steps of K micro-batches. The program starts two ranks of one thread each; with a launcher's
// variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) the program is one rank of the launcher's.
//
//   data_parallel           takes turns with benchmarks/peers/data_parallel.py: see script/bench
//   data_parallel measure   times of steps, as JSON, for tools/scaling_model.py;
//                           options: WIDTH LAYERS BUCKET_BYTES K...

#include "snug/distributed/data_parallel.h"

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include "benchmarks/serve.h"
#include "program/measure/measure.h"
#include "program/measure/parallel_gpt.h"
#include "program/models/gpt.h"
#include "snug/adamw.h"
#include "snug/distributed/process_group.h"
#include "snug/distributed/sharded_optimizer.h"

namespace {

using snug::ProcessGroup;
using snug::Shard;
using snug::measure::ParallelGpt;
using torch::Tensor;

// This process becomes rank 0, and a child process rank 1.
void become_two_ranks(char** argv) {
  if (std::getenv("RANK") != nullptr) {
    return;
  }
  const std::string port = std::to_string(20000 + ::getpid() % 20000);
  for (const auto& [name, value] : std::map<std::string, std::string>{{"WORLD_SIZE", "2"},
                                                                      {"MASTER_ADDR", "127.0.0.1"},
                                                                      {"MASTER_PORT", port},
                                                                      {"OMP_NUM_THREADS", "1"},
                                                                      {"OMP_PROC_BIND", "false"}}) {
    ::setenv(name.c_str(), value.c_str(), 1);
  }
  const pid_t child = ::fork();
  if (child < 0) {
    std::cerr << "data_parallel: fork: " << std::strerror(errno) << "\n";
    std::exit(1);
  }
  const bool is_child = child == 0;
  ::setenv("RANK", is_child ? "1" : "0", 1);
  ::setenv("LOCAL_RANK", is_child ? "1" : "0", 1);
  ::execv("/proc/self/exe", argv);
  std::exit(1);
}

constexpr std::array kSplits{1, 2, 4, 8};

// What each rank keeps a share of.
struct Way {
  const char* name;
  bool shards_state;
  Shard shard;
};
constexpr std::array kWays{Way{"replicated", false, Shard::None}, Way{"state", true, Shard::None},
                           Way{"gradients", true, Shard::Gradients}, Way{"weights", true, Shard::Weights}};

// Training of a GPT, the same in each way. A batch of a rank is 2 x 128 tokens.
class Training {
 public:
  Training(const std::shared_ptr<ProcessGroup>& group, const Way& way) {
    const auto adamw = [](const auto& groups) { return std::make_unique<snug::AdamW>(groups); };
    torch::manual_seed(1);
    model_ = snug::Gpt(snug::GptOptions{.context = 128, .layers = 6, .heads = 8, .width = 256});
    tokens_ = torch::randint(256, {2, 128});
    snug::DataParallelOptions options{.shard = way.shard};
    if (way.shards_state) {
      auto sharded = std::make_unique<snug::ShardedOptimizer>(model_->parameters(), group, adamw);
      options.optimizer = sharded.get();
      optimizer_ = std::move(sharded);
    } else {
      optimizer_ = adamw(std::vector{torch::optim::OptimizerParamGroup(model_->parameters())});
    }
    parallel_ = std::make_unique<snug::DataParallel>(model_, group, options);
  }

  void step() {
    optimizer_->zero_grad();
    parallel_
        ->forward([&] {
          return torch::nn::functional::cross_entropy(model_->forward(tokens_).flatten(0, 1), tokens_.flatten());
        })
        .backward();
    optimizer_->step();
  }

 private:
  snug::Gpt model_{nullptr};
  Tensor tokens_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<snug::DataParallel> parallel_;
};

// Offers the cases "k1_once" to "k8_once": K micro-batches, of which the last communicates; and "replicated", "state",
// "gradients" and "weights": a step of training in each way. Rank 0 tells the other ranks the K of each step, or -1 to
// -4 for the ways; 0 ends them.
int serve(const std::shared_ptr<ProcessGroup>& group) {
  ParallelGpt gpt(group, /*layers=*/6, /*width=*/256);
  std::array<std::optional<Training>, kWays.size()> trainings;
  const auto step = [&](int order) {
    if (order > 0) {
      gpt.step(order, /*loud=*/1);
      return;
    }
    const auto number = static_cast<size_t>(-order - 1);
    if (!trainings[number]) {
      trainings[number].emplace(group, kWays[number]);
    }
    trainings[number]->step();
  };
  const Tensor order = torch::zeros({1}, torch::kLong);
  const auto tell = [&](int64_t number) {
    order.fill_(number);
    group->broadcast({order});
  };
  if (group->rank() > 0) {
    while (true) {
      group->broadcast({order});
      if (order.item<int64_t>() == 0) {
        return 0;
      }
      step(order.item<int>());
    }
  }
  std::map<std::string, snug::benchmarks::Prepare> cases;
  const auto add = [&](const std::string& name, int number) {
    cases[name] = [&, number]() -> std::function<void()> {
      return [&, number] {
        tell(number);
        step(number);
      };
    };
  };
  for (const int k : kSplits) {
    add(fmt::format("k{}_once", k), k);
  }
  for (size_t i = 0; i < kWays.size(); ++i) {
    add(kWays[i].name, -1 - static_cast<int>(i));
  }
  const int status = snug::benchmarks::serve(cases);
  tell(0);
  return status;
}

// The median over several steps, of the slowest rank.
double seconds(ProcessGroup& group, const std::function<void()>& step) {
  step();
  step();
  std::vector<double> times;
  for (int i = 0; i < 5; ++i) {
    times.push_back(snug::measure::slowest_seconds(group, step));
  }
  return snug::measure::spread_of(times).median;
}

void measure_steps(const std::shared_ptr<ProcessGroup>& group, const std::vector<std::string>& options) {
  const int64_t bucket = std::stoll(options[2]);
  ParallelGpt gpt(group, /*layers=*/std::stoll(options[1]), /*width=*/std::stoll(options[0]),
                  {.bucket = snug::Bytes(bucket)});
  std::string steps;
  for (size_t i = 3; i < options.size(); ++i) {
    const int k = std::stoi(options[i]);
    steps += fmt::format("{}{{\"k\": {}, \"none\": {:.6f}, \"once\": {:.6f}, \"each\": {:.6f}}}", i > 3 ? ", " : "", k,
                         seconds(*group, [&] { gpt.step(k, 0); }), seconds(*group, [&] { gpt.step(k, 1); }),
                         seconds(*group, [&] { gpt.step(k, k); }));
  }
  const int64_t bytes = snug::measure::bytes_of(gpt.parameters());
  const Tensor gradients = torch::zeros({bytes / 4});
  const double all_reduce = seconds(*group, [&] { group->all_reduce(gradients); });
  if (group->rank() == 0) {
    fmt::print("{{\"ranks\": {}, \"bytes\": {}, \"bucket\": {}, \"all_reduce\": {:.6f}, \"steps\": [{}]}}\n",
               group->size(), bytes, bucket, all_reduce, steps);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  become_two_ranks(argv);
  const auto group = snug::init_process_group();
  if (arguments.empty()) {
    return serve(group);
  }
  if (arguments[0] != "measure" || arguments.size() < 5) {
    std::cerr << "usage: data_parallel [measure WIDTH LAYERS BUCKET_BYTES K...]\n";
    return 2;
  }
  measure_steps(group, {arguments.begin() + 1, arguments.end()});
  group->barrier();
  return 0;
}
