// Plans of a GPT's step on a device, with LibTorch's deterministic kernels, as one line of JSON: whether gradients have
// the bits of plain training, and the peaks of allocated and of reserved bytes beside the predicted one.
//
// usage: planned_gpt gpt-tiny|gpt-small|gpt-base SEQUENCES [--device DEVICE]
//
// Bytes are above the level before the step. On a CPU none are reserved.

#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include "benchmarks/device.h"
#include "program/models/gpt.h"
#include "snug/memory.h"
#include "snug/plan.h"
#include "src/planner/curve.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"

namespace {

using torch::Tensor;

class PlannedGpt {
 public:
  PlannedGpt(const std::string& name, int64_t sequences, c10::Device device)
      : device_(device), model_(snug::gpt_configuration(name)) {
    snug::move_to(*model_, device);
    const int64_t context = model_->options.context;
    tokens_ = torch::randint(model_->options.vocab, {sequences, context}).to(device);
  }

  nlohmann::json report() {
    const nlohmann::json plain = step(nullptr, 0);
    const std::vector<Tensor> expected = take_gradients();
    nlohmann::json again = step(nullptr, 0);
    again["same_bits"] = same_bits(take_gradients(), expected);
    const snug::plan::Profile profile = snug::detail::profile_step([this] { return loss(); });
    const auto curve = snug::plan::curve(snug::plan::Simulator(profile), {.points = 5});
    nlohmann::json plans = nlohmann::json::array();
    for (const auto& point : curve.points) {
      const snug::ActivationPlan plan = snug::detail::unverified_plan(profile, snug::Bytes(point.peak_bytes));
      nlohmann::json one = step(&plan, plan.predicted_peak_bytes);
      one["same_bits"] = same_bits(take_gradients(), expected);
      plans.push_back(std::move(one));
    }
    return {{"device", device_.str()}, {"plain", plain}, {"plain again", again}, {"plans", plans}};
  }

 private:
  Tensor loss() {
    return torch::nn::functional::cross_entropy(model_->forward(tokens_).flatten(0, 1), tokens_.flatten());
  }

  nlohmann::json step(const snug::ActivationPlan* plan, int64_t predicted) {
    const int64_t reserved_before = restart_reserved();
    const snug::MemoryMeter meter(device_);
    Tensor value;
    if (plan != nullptr) {
      const snug::Rematerialize scope(*plan);
      value = loss();
    } else {
      value = loss();
    }
    value.backward();
    snug::benchmarks::wait_for(device_);
    return {
        {"predicted", predicted}, {"allocated", meter.report().peak_bytes}, {"reserved", reserved() - reserved_before}};
  }

  std::vector<Tensor> take_gradients() {
    std::vector<Tensor> gradients;
    for (const Tensor& parameter : model_->parameters()) {
      gradients.push_back(parameter.grad().cpu());
      parameter.mutable_grad() = Tensor();
    }
    return gradients;
  }

  static bool same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const Tensor& x, const Tensor& y) { return x.view(torch::kInt).equal(y.view(torch::kInt)); });
  }

  auto* allocator() const { return c10::getDeviceAllocator(device_.type()); }
  static constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  int64_t reserved() const {
    return device_.is_cpu() ? 0
                            : allocator()->getDeviceStats(at::accelerator::getDeviceIndex()).reserved_bytes[kAll].peak;
  }
  int64_t restart_reserved() const {
    if (!device_.is_cpu()) {
      allocator()->emptyCache();
      allocator()->resetPeakStats(at::accelerator::getDeviceIndex());
    }
    return reserved();
  }

  c10::Device device_;
  snug::Gpt model_;
  Tensor tokens_;
};

}  // namespace

int main(int argc, char** argv) {
  const c10::Device device = snug::benchmarks::take_device(argc, argv);
  if (argc != 3 || std::atoi(argv[2]) < 1) {
    std::cerr << "usage: planned_gpt gpt-tiny|gpt-small|gpt-base SEQUENCES [--device DEVICE]\n";
    return 2;
  }
  at::globalContext().setDeterministicCuDNN(true);
  at::globalContext().setBenchmarkCuDNN(false);
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  torch::manual_seed(1);
  std::cout << PlannedGpt(argv[1], std::atoi(argv[2]), device).report().dump() << "\n";
}
