// Step time over the bytes that a step takes, for each way to take fewer: as lines of CSV. benchmarks/budget_sweep.py
// runs the program and benchmarks/peers/budget_sweep.py, and budget_sweep_figure draws the lines. On the CPU
// `snug compare checkpointing` compares more ways at fewer budgets.
//
// usage: budget_sweep gpt|gpt-tiny|gpt-base|resnet PAIRS [PER_CENTS] [--device DEVICE]
//
// - peak: the rise of memory above the level before the step, less the bytes of all gradients
// - time: the median of PAIRS ratios of a step's time (on the CPU the processor's) to the time of a step that keeps
//   everything; the two steps take turns. "keep everything" is that step against that step
// - PER_CENTS, such as 50,25,9: only plans for these shares of the peak, each explained on standard error

#include <algorithm>
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
#include "program/measure/deep_models.h"
#include "program/measure/measure.h"
#include "program/measure/plans.h"
#include "snug/core.h"
#include "snug/plan.h"
#include "snug/sliced.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"

namespace {

namespace measure = snug::measure;
using measure::DeepModel;
using torch::Tensor;
using RunLayers = std::function<Tensor(const measure::Layers&, Tensor)>;

class Sweep {
 public:
  Sweep(DeepModel model, std::string name, int pairs, c10::Device device)
      : model_(measure::on_device(std::move(model), device)),
        input_(model_.input(model_.batch)),
        parameters_(model_.parameters()),
        name_(std::move(name)),
        pairs_(pairs),
        device_(device),
        plain_(split_step(measure::in_order, 1)) {}

  void run() {
    report("keep everything", "", plain_);
    const RunLayers every_block = [](const measure::Layers& layers, Tensor x) {
      return measure::each_checkpointed(layers, std::move(x));
    };
    const int64_t every_block_takes = report("every block", "", split_step(every_block, 1));
    for (int64_t segments = 2; segments < std::ssize(model_.layers); ++segments) {
      const RunLayers in_segments = [segments](const measure::Layers& layers, const Tensor& x) {
        return snug::checkpoint_sequential(layers, segments, x);
      };
      report("checkpoint_sequential", fmt::format("{} segments", segments), split_step(in_segments, 1));
    }
    // With BatchNorm another computation, because the statistics are the part's.
    for (int64_t parts = 2; parts <= std::min<int64_t>(model_.batch, 8); parts *= 2) {
      report("smaller micro-batches", fmt::format("{} of them", parts), split_step(measure::in_order, parts));
    }
    automatic({every_block_takes, 0}, {95, 90, 80, 70, 60, 50, 40, 30, 25, 20, 15, 12, 9, 7, 5});
  }

  void explain_plans(const std::vector<int>& per_cents) {
    report("keep everything", "", plain_);
    explains_ = true;
    automatic({}, per_cents);
  }

 private:
  // The share of some items in the batch's mean loss.
  Tensor loss(const RunLayers& run, int64_t first, int64_t items) const {
    return model_.loss(input_.narrow(0, first, items), [&](Tensor x) { return run(model_.layers, std::move(x)); }) *
           (static_cast<double>(items) / static_cast<double>(model_.batch));
  }

  std::function<void()> split_step(const RunLayers& run, int64_t parts) const {
    return [this, run, parts] {
      const int64_t items = model_.batch / parts;
      measure::drop_gradients(parameters_);
      for (int64_t first = 0; first < model_.batch; first += items) {
        loss(run, first, items).backward();
      }
    };
  }

  // Plans within these peaks, and within these shares of the plain peak, down to the smallest feasible budget.
  void automatic(std::vector<int64_t> peaks, const std::vector<int>& per_cents) {
    const std::function<Tensor()> forward = [this] { return loss(measure::in_order, 0, model_.batch); };
    const int64_t gradients = measure::bytes_of(parameters_), most = peak_of(plain_);
    measure::drop_gradients(parameters_);
    const snug::plan::Profile profile = snug::detail::profile_step(forward);
    const int64_t least = measure::least_bytes_of_plan(profile);
    for (const int share : per_cents) {
      peaks.push_back(most * share / 100);
    }
    std::sort(peaks.begin(), peaks.end(), std::greater<>());
    for (const int64_t peak : peaks) {
      const int64_t budget = std::max(least, gradients + peak);
      const snug::ActivationPlan plan = snug::detail::unverified_plan(profile, snug::Bytes(budget));
      report("automatic",
             fmt::format("predicted {} bytes; {:.3f}", plan.predicted_peak_bytes - gradients,
                         plan.predicted_seconds / plan.plain_seconds),
             [this, planned = measure::under_plan(forward, plan)] {
               measure::drop_gradients(parameters_);
               planned().backward();
             });
      if (explains_) {
        std::cerr << plan.explain() << "\n";
      }
      if (budget == least) {
        return;
      }
    }
  }

  int64_t peak_of(const std::function<void()>& step) const {
    return measure::bytes_of_step(parameters_, step).activations;
  }

  // Returns the peak.
  int64_t report(const std::string& method, const std::string& setting, const std::function<void()>& step) const {
    const int64_t peak = peak_of(step);
    const auto program = [this](const std::function<void()>& one) {
      return [this, &one] { return measure::busy_seconds_of(device_, one); };
    };
    const auto [median, low, high] = measure::take_turns({program(plain_), program(step)}, pairs_).ratio(1);
    std::cout << fmt::format("{},C++,{},{},{},{:.4f},{:.4f},{:.4f}\n", name_, method, setting, peak, median, low, high)
              << std::flush;
    return peak;
  }

  DeepModel model_;
  Tensor input_;
  std::vector<Tensor> parameters_;
  std::string name_;
  int pairs_;
  c10::Device device_;
  std::function<void()> plain_;
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
  const std::map<std::string, std::function<DeepModel()>> subjects{
      {"gpt", [] { return measure::deep_gpt(/*layers=*/12, /*width=*/256, /*context=*/256, /*batch=*/4); }},
      {"gpt-tiny", [] { return measure::deep_gpt(snug::gpt_configuration("gpt-tiny"), 2); }},
      {"gpt-base", [] { return measure::deep_gpt(snug::gpt_configuration("gpt-base"), 8); }},
      {"resnet", [] { return measure::deep_resnet(/*depth=*/20, /*batch=*/32); }}};
  const auto subject = subjects.find(argc > 1 ? argv[1] : "");
  const int pairs = argc > 2 ? std::atoi(argv[2]) : 0;
  if (subject == subjects.end() || pairs < 1) {
    std::cerr << "usage: budget_sweep gpt|gpt-tiny|gpt-base|resnet PAIRS [PER_CENTS] [--device DEVICE]\n";
    return 2;
  }
  Sweep sweep(subject->second(), subject->first, pairs, device);
  if (argc > 3) {
    sweep.explain_plans(numbers_in(argv[3]));
  } else {
    sweep.run();
  }
}
