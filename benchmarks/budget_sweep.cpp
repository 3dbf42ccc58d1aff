// Step time over the bytes that a step takes, for each way to take fewer: as lines of CSV. benchmarks/budget_sweep.py
// runs it together with its Python peer, and budget_sweep_figure draws it.
//
// usage: budget_sweep gpt|gpt-tiny|gpt-base|resnet PAIRS [PER_CENTS] [--device DEVICE]
//
// peak: how far memory rises above its level before the step, less the bytes of all gradients. time: of a step (on the
// CPU the processor's), as the median of PAIRS ratios to one that keeps everything; the two take turns. "keep
// everything" is that step against itself. PER_CENTS, such as 50,25,9: only plans for these shares of the peak, each
// explained on standard error.

#include <algorithm>
#include <chrono>
#include <ctime>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <torch/torch.h>

#include "benchmarks/device.h"
#include "program/models/gpt.h"
#include "program/models/resnet.h"
#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/plan.h"
#include "snug/sliced.h"
#include "src/planner/curve.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"

namespace {

using torch::Tensor;
using Layer = std::function<Tensor(Tensor)>;
using Layers = std::vector<Layer>;
using RunLayers = std::function<Tensor(const Layers&, Tensor)>;

struct Subject {
  c10::Device device;
  std::vector<Tensor> parameters;
  int64_t batch;
  int64_t blocks;
  std::function<Tensor(const RunLayers& run, int64_t first, int64_t items)> loss;  // share of the batch's mean
};

template <class Blocks>
Layers layers_of(Blocks& blocks) {
  Layers layers;
  for (auto& block : blocks) {
    layers.push_back([block = block.ptr()](Tensor x) { return block->forward(std::move(x)); });
  }
  return layers;
}

// As in benchmarks/peers/budget_sweep.py.
Subject gpt(const snug::GptOptions& options, int64_t sequences, c10::Device device) {
  torch::manual_seed(1);
  snug::Gpt model(options);
  snug::move_to(*model, device);
  const Tensor tokens = torch::randint(options.vocab, {sequences, options.context}).to(device);
  const Layers layers = layers_of(model->blocks);
  return {device, model->parameters(), sequences, options.layers,
          [=](const RunLayers& run, int64_t first, int64_t items) mutable {
            const Tensor part = tokens.narrow(0, first, items);
            Tensor h = model->token_embedding->forward(part) +
                       model->position_embedding->forward(torch::arange(options.context, device));
            h = model->norm->forward(run(layers, h));
            const Tensor logits = torch::matmul(h, model->head_weight().t());
            return torch::nn::functional::cross_entropy(logits.flatten(0, 1), part.flatten()) *
                   (static_cast<double>(items) / static_cast<double>(sequences));
          }};
}

Subject resnet(c10::Device device) {
  torch::manual_seed(1);
  snug::ResNet model(snug::ResNetOptions{.depth = 20});
  snug::move_to(*model, device);
  const Tensor pictures = torch::randn({32, 3, 32, 32}).to(device);
  const Tensor classes = (torch::arange(32) % 10).to(device);
  const Layers layers = layers_of(model->blocks);
  return {device, model->parameters(), 32, std::ssize(model->blocks),
          [=](const RunLayers& run, int64_t first, int64_t items) mutable {
            const Tensor h = run(layers, model->stem->forward(pictures.narrow(0, first, items)));
            return torch::nn::functional::cross_entropy(model->head->forward(h.mean({2, 3})),
                                                        classes.narrow(0, first, items)) *
                   (static_cast<double>(items) / 32);
          }};
}

Tensor keep_everything(const Layers& layers, Tensor x) {
  for (const Layer& layer : layers) {
    x = layer(std::move(x));
  }
  return x;
}

Tensor every_block(const Layers& layers, Tensor x) {
  for (const Layer& layer : layers) {
    x = snug::checkpoint(layer, std::move(x));
  }
  return x;
}

class Sweep {
 public:
  Sweep(Subject subject, std::string name, int pairs)
      : subject_(std::move(subject)), name_(std::move(name)), pairs_(pairs), plain_(split_step(keep_everything, 1)) {
    plain_();
    gradients_ = live_bytes();
    clear_gradients();
    gradients_ -= live_bytes();
  }

  void run() {
    report("keep everything", "", plain_);
    const int64_t every_block_takes = report("every block", "", split_step(every_block, 1));
    for (int64_t segments = 2; segments < subject_.blocks; ++segments) {
      const RunLayers in_segments = [segments](const Layers& layers, const Tensor& x) {
        return snug::checkpoint_sequential(layers, segments, x);
      };
      report("checkpoint_sequential", fmt::format("{} segments", segments), split_step(in_segments, 1));
    }
    // With BatchNorm another computation, since statistics are those of a part.
    for (int64_t parts = 2; parts <= std::min<int64_t>(subject_.batch, 8); parts *= 2) {
      report("smaller micro-batches", fmt::format("{} of them", parts), split_step(keep_everything, parts));
    }
    automatic({every_block_takes, 0}, {95, 90, 80, 70, 60, 50, 40, 30, 25, 20, 15, 12, 9, 7, 5});
  }

  void explain_plans(const std::vector<int>& per_cents) {
    report("keep everything", "", plain_);
    explains_ = true;
    automatic({}, per_cents);
  }

 private:
  std::function<void()> split_step(RunLayers run, int64_t parts) const {
    return [this, run = std::move(run), parts] {
      const int64_t items = subject_.batch / parts;
      clear_gradients();
      for (int64_t first = 0; first < subject_.batch; first += items) {
        subject_.loss(run, first, items).backward();
      }
    };
  }

  int64_t live_bytes() const { return snug::live_bytes(subject_.device).count(); }

  void clear_gradients() const {
    for (const Tensor& parameter : subject_.parameters) {
      Tensor(parameter).mutable_grad() = Tensor();
    }
  }

  // Within these peaks and these shares of what keeping everything takes, down to the smallest budget that is feasible.
  void automatic(std::vector<int64_t> peaks, const std::vector<int>& per_cents) {
    const auto forward = [this] { return subject_.loss(keep_everything, 0, subject_.batch); };
    clear_gradients();
    const snug::plan::Profile profile = snug::detail::profile_step(forward);
    const int64_t least = snug::plan::curve(snug::plan::Simulator(profile), {.points = 2}).smallest_feasible_bytes();
    const int64_t most = peak_of(plain_);
    for (const int share : per_cents) {
      peaks.push_back(most * share / 100);
    }
    std::sort(peaks.begin(), peaks.end(), std::greater<>());
    for (const int64_t peak : peaks) {
      const int64_t budget = std::max(least, gradients_ + peak);
      const snug::ActivationPlan plan = snug::detail::unverified_plan(profile, snug::Bytes(budget));
      const auto step = [this, forward, plan] {
        clear_gradients();
        Tensor loss;
        {
          const snug::Rematerialize scope(plan);
          loss = forward();
        }
        loss.backward();
      };
      report("automatic",
             fmt::format("predicted {} bytes; {:.3f}", plan.predicted_peak_bytes - gradients_,
                         plan.predicted_seconds / plan.plain_seconds),
             step);
      if (explains_) {
        std::cerr << plan.explain() << "\n";
      }
      if (budget == least) {
        return;
      }
    }
  }

  int64_t peak_of(const std::function<void()>& step) const {
    clear_gradients();
    const snug::MemoryMeter meter(subject_.device);
    step();
    return meter.report().peak_bytes - gradients_;
  }

  // Of the processor on the CPU, which others use too; elapsed time on a device, which computes beside the processor.
  double seconds_of(const std::function<void()>& step) const {
    const auto now = [&]() -> double {
      if (subject_.device.is_cpu()) {
        return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
      }
      snug::benchmarks::wait_for(subject_.device);
      return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    };
    const double start = now();
    step();
    return now() - start;
  }

  // Returns the peak.
  int64_t report(const std::string& method, const std::string& setting, const std::function<void()>& step) const {
    const int64_t peak = peak_of(step);
    std::vector<double> ratios;
    for (int i = 0; i < pairs_; ++i) {
      const bool plain_first = i % 2 == 0;
      const double before = seconds_of(plain_first ? plain_ : step);
      const double after = seconds_of(plain_first ? step : plain_);
      ratios.push_back(plain_first ? after / before : before / after);
    }
    std::sort(ratios.begin(), ratios.end());
    std::cout << fmt::format("{},C++,{},{},{},{:.4f},{:.4f},{:.4f}\n", name_, method, setting, peak,
                             ratios[ratios.size() / 2], ratios.front(), ratios.back())
              << std::flush;
    return peak;
  }

  Subject subject_;
  std::string name_;
  int pairs_;
  std::function<void()> plain_;
  int64_t gradients_ = 0;
  bool explains_ = false;
};

std::vector<int> numbers_in(const std::string& text) {
  std::vector<int> numbers;
  std::istringstream in(text);
  for (std::string word; std::getline(in, word, ',');) {
    numbers.push_back(std::stoi(word));
  }
  return numbers;
}

}  // namespace

int main(int argc, char** argv) {
  const c10::Device device = snug::benchmarks::take_device(argc, argv);
  const std::map<std::string, std::function<Subject()>> subjects{
      {"gpt", [&] { return gpt({.vocab = 256, .context = 256, .layers = 12, .heads = 8, .width = 256}, 4, device); }},
      {"gpt-tiny", [&] { return gpt(snug::gpt_configuration("gpt-tiny"), 2, device); }},
      {"gpt-base", [&] { return gpt(snug::gpt_configuration("gpt-base"), 8, device); }},
      {"resnet", [&] { return resnet(device); }}};
  const auto subject = subjects.find(argc > 1 ? argv[1] : "");
  const int pairs = argc > 2 ? std::atoi(argv[2]) : 0;
  if (subject == subjects.end() || pairs < 1) {
    std::cerr << "usage: budget_sweep gpt|gpt-tiny|gpt-base|resnet PAIRS [PER_CENTS] [--device DEVICE]\n";
    return 2;
  }
  Sweep sweep(subject->second(), subject->first, pairs);
  if (argc > 3) {
    sweep.explain_plans(numbers_in(argv[3]));
  } else {
    sweep.run();
  }
}
