// Data parallelism: steps of K micro-batches. It starts its own ranks, two of one thread each; with a
// launcher's variables set (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) it is one rank of those.
//
//   data_parallel           takes turns with benchmarks/peers/data_parallel.py: see script/bench
//   data_parallel measure   times of steps, as JSON, for tools/scaling_model.py;
//                           options: WIDTH LAYERS BUCKET_BYTES K...

#include "snug/distributed/data_parallel.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include "benchmarks/serve.h"
#include "program/models/gpt.h"

namespace {

using snug::ProcessGroup;
using torch::Tensor;
using Clock = std::chrono::steady_clock;

// This process becomes rank 0; its child is rank 1.
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
  const bool is_child = ::fork() == 0;
  ::setenv("RANK", is_child ? "1" : "0", 1);
  ::setenv("LOCAL_RANK", is_child ? "1" : "0", 1);
  ::execv("/proc/self/exe", argv);
  std::exit(1);
}

// A GPT and steps of it. Each micro-batch is 2 x 128 tokens.
class Work {
 public:
  Work(std::shared_ptr<ProcessGroup> group, int64_t width, int64_t layers, snug::DataParallelOptions options = {})
      : group_(std::move(group)) {
    torch::manual_seed(1);
    model_ = snug::Gpt(
        snug::GptOptions{.vocab = 256, .context = 128, .layers = layers, .heads = width / 32, .width = width});
    tokens_ = torch::randint(256, {2, 128});
    ddp_ = std::make_unique<snug::DataParallel>(model_, group_, std::move(options));
  }

  // Forward and backward of `micro_batches`, of which `loud` communicate: the last, all or none.
  void step(int micro_batches, int loud) {
    model_->zero_grad();
    for (int i = 0; i < micro_batches; ++i) {
      std::optional<snug::NoSync> quiet;
      if (i < micro_batches - loud) {
        quiet.emplace(*ddp_);
      }
      ddp_->forward([&] {
            return torch::nn::functional::cross_entropy(model_->forward(tokens_).flatten(0, 1), tokens_.flatten());
          })
          .backward();
    }
  }

  int64_t parameter_bytes() const {
    int64_t bytes = 0;
    for (const Tensor& parameter : model_->parameters()) {
      bytes += static_cast<int64_t>(parameter.nbytes());
    }
    return bytes;
  }

 private:
  std::shared_ptr<ProcessGroup> group_;
  snug::Gpt model_{nullptr};
  Tensor tokens_;
  std::unique_ptr<snug::DataParallel> ddp_;
};

constexpr int64_t kWidth = 256;
constexpr int64_t kLayers = 6;

// "k4_once": 4 micro-batches, of which the last communicates.
std::vector<std::pair<std::string, std::function<void(Work&)>>> cases() {
  std::vector<std::pair<std::string, std::function<void(Work&)>>> result;
  for (const int k : {1, 2, 4, 8}) {
    result.emplace_back(fmt::format("k{}_once", k), [k](Work& work) { work.step(k, 1); });
  }
  return result;
}

// Rank 0 tells the others what is asked of it.
int serve(const std::shared_ptr<ProcessGroup>& group) {
  Work work(group, kWidth, kLayers);
  const Tensor order = torch::zeros({1}, torch::kLong);
  const auto all = cases();
  if (group->rank() > 0) {
    while (true) {
      group->broadcast({order});
      if (order.item<int64_t>() < 0) {
        return 0;
      }
      all[static_cast<size_t>(order.item<int64_t>())].second(work);
    }
  }
  std::map<std::string, snug::benchmarks::Prepare> offered;
  for (size_t i = 0; i < all.size(); ++i) {
    offered[all[i].first] = [&, i]() -> std::function<void()> {
      return [&, i] {
        order.fill_(static_cast<int64_t>(i));
        group->broadcast({order});
        all[i].second(work);
      };
    };
  }
  const int status = snug::benchmarks::serve(offered);
  order.fill_(-1);
  group->broadcast({order});
  return status;
}

// The median over several steps, of the slowest rank.
double seconds(ProcessGroup& group, const std::function<void()>& step) {
  std::vector<double> times;
  step();
  step();
  for (int i = 0; i < 5; ++i) {
    group.barrier();
    const auto start = Clock::now();
    step();
    const Tensor time = torch::full({}, std::chrono::duration<double>(Clock::now() - start).count(), torch::kDouble);
    group.all_reduce(time, snug::ReduceOp::Max);
    times.push_back(time.item<double>());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void measure(const std::shared_ptr<ProcessGroup>& group, const std::vector<std::string>& options) {
  const int64_t bucket = std::stoll(options[2]);
  Work work(group, std::stoll(options[0]), std::stoll(options[1]), {.bucket = snug::Bytes(bucket)});
  std::string steps;
  for (size_t i = 3; i < options.size(); ++i) {
    const int k = std::stoi(options[i]);
    steps += fmt::format("{}{{\"k\": {}, \"none\": {:.6f}, \"once\": {:.6f}, \"each\": {:.6f}}}", i > 3 ? ", " : "", k,
                         seconds(*group, [&] { work.step(k, 0); }), seconds(*group, [&] { work.step(k, 1); }),
                         seconds(*group, [&] { work.step(k, k); }));
  }
  const Tensor gradients = torch::zeros({work.parameter_bytes() / 4});
  const double all_reduce = seconds(*group, [&] { group->all_reduce(gradients); });
  if (group->rank() == 0) {
    fmt::print("{{\"ranks\": {}, \"bytes\": {}, \"bucket\": {}, \"all_reduce\": {:.6f}, \"steps\": [{}]}}\n",
               group->size(), work.parameter_bytes(), bucket, all_reduce, steps);
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
  measure(group, {arguments.begin() + 1, arguments.end()});
  group->barrier();
  return 0;
}
