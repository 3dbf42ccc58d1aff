// Plans of a GPT's step on a device, with LibTorch's deterministic kernels, as one line of JSON: whether gradients have
// the bits of plain training, and the predicted peak beside the peaks of allocated and of reserved bytes.
//
// usage: planned_gpt gpt-tiny|gpt-small|gpt-base SEQUENCES [--device DEVICE]
//
// Bytes are above the level before the step. On a CPU none are reserved.

#include <cstdlib>
#include <functional>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <torch/torch.h>

#include "benchmarks/device.h"
#include "program/measure/deep_models.h"
#include "program/measure/measure.h"
#include "program/measure/plans.h"
#include "snug/memory.h"
#include "snug/plan.h"
#include "src/planner/curve.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"

namespace {

namespace measure = snug::measure;
using torch::Tensor;

class PlannedGpt {
 public:
  PlannedGpt(const std::string& name, int64_t sequences, c10::Device device)
      : device_(device),
        model_(measure::on_device(measure::deep_gpt(snug::gpt_configuration(name), sequences), device)),
        tokens_(model_.input(sequences)) {}

  nlohmann::json report() {
    const auto plain = [this] {
      return model_.loss(tokens_, [this](Tensor x) { return measure::in_order(model_.layers, std::move(x)); });
    };
    const nlohmann::json first = step(plain, 0);
    const std::vector<Tensor> expected = take_gradients();
    nlohmann::json again = step(plain, 0);
    again["same_bits"] = measure::same_bits(take_gradients(), expected);
    const snug::plan::Profile profile = snug::detail::profile_step(plain);
    const auto curve = snug::plan::curve(snug::plan::Simulator(profile), {.points = 5});
    nlohmann::json plans = nlohmann::json::array();
    for (const auto& point : curve.points) {
      const snug::ActivationPlan plan = snug::detail::unverified_plan(profile, snug::Bytes(point.peak_bytes));
      nlohmann::json one = step(measure::under_plan(plain, plan), plan.predicted_peak_bytes);
      one["same_bits"] = measure::same_bits(take_gradients(), expected);
      plans.push_back(std::move(one));
    }
    return {{"device", device_.str()}, {"plain", first}, {"plain again", again}, {"plans", plans}};
  }

 private:
  nlohmann::json step(const std::function<Tensor()>& forward, int64_t predicted) {
    const int64_t reserved_before = restart_reserved();
    const snug::MemoryMeter meter(device_);
    forward().backward();
    measure::wait_for(device_);
    return {
        {"predicted", predicted}, {"allocated", meter.report().peak_bytes}, {"reserved", reserved() - reserved_before}};
  }

  // Copies on the CPU, which take no memory of the device.
  std::vector<Tensor> take_gradients() {
    std::vector<Tensor> gradients;
    for (const Tensor& gradient : measure::gradients_of(model_.parameters())) {
      gradients.push_back(gradient.cpu());
    }
    measure::drop_gradients(model_.parameters());
    return gradients;
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
  measure::DeepModel model_;
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
  std::cout << PlannedGpt(argv[1], std::atoi(argv[2]), device).report().dump() << "\n";
}
