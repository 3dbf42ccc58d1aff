#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim.h>

#include "snug/memory.h"
#include "src/core/has_bytes.h"
#include "src/core/optimizer_capabilities.h"
#include "src/memory/absent_storage.h"
#include "src/memory/allocation_log.h"
#include "src/memory/device.h"
#include "src/memory/device_memory.h"
#include "src/memory/saved_tensor_policy.h"

namespace snug {
namespace {

enum class Category { Parameter, Gradient, OptimizerState };

}  // namespace

class MemoryMeter::Impl final : public detail::MemoryObserver {
 public:
  explicit Impl(c10::Device device) : device_(detail::ready(device)) {
    detail::install_engine();
    start_level_ = live_bytes(device_).count();
    observation_.emplace(*this, device_, detail::SavedTensors::Report);
  }

  void on_allocate(c10::Device, const void* data, int64_t bytes) noexcept override {
    const std::lock_guard lock(mutex_);
    log_.allocate(data, bytes);
  }
  void on_free(c10::Device, const void* data, int64_t bytes) noexcept override {
    const std::lock_guard lock(mutex_);
    log_.release(data, bytes);
  }
  void on_saved_for_backward(const void* data) noexcept override {
    const std::lock_guard lock(mutex_);
    log_.mark_saved(data);
  }

  MemoryMeter::Report report() const;

  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> buffers;
  std::vector<const torch::optim::Optimizer*> optimizers;

 private:
  struct Named {
    Category category;
    int64_t bytes;
  };
  bool is_mine(c10::Device device) const { return device.is_cpu() ? device_.is_cpu() : device == device_; }
  std::unordered_map<const void*, Named> named_storages() const;

  c10::Device device_;
  int64_t start_level_ = 0;
  mutable std::mutex mutex_;
  detail::AllocationLog log_;
  std::optional<detail::MemoryObservation> observation_;  // last, because the observation uses the other members
};

std::unordered_map<const void*, MemoryMeter::Impl::Named> MemoryMeter::Impl::named_storages() const {
  std::unordered_map<const void*, Named> named;
  const auto name = [&](const at::Tensor& tensor, Category category) {
    if (detail::has_bytes(tensor) && is_mine(tensor.device()) &&
        !detail::is_borrowed_or_absent(detail::memory_of(tensor.storage()))) {
      named.try_emplace(detail::memory_of(tensor.storage()).get(),
                        Named{category, static_cast<int64_t>(tensor.storage().nbytes())});
    }
  };
  for (const auto* tensors : {&parameters, &buffers}) {
    for (const at::Tensor& tensor : *tensors) {
      name(tensor, Category::Parameter);
    }
  }
  for (const at::Tensor& parameter : parameters) {
    name(parameter.grad(), Category::Gradient);
  }
  for (const auto* optimizer : optimizers) {
    for (const auto& group : optimizer->param_groups()) {
      for (const at::Tensor& parameter : group.params()) {  // masters, for example, belong to no module
        name(parameter, Category::Parameter);
        name(parameter.grad(), Category::Gradient);
      }
    }
    for (const at::Tensor& tensor : detail::state_tensors(*optimizer)) {
      name(tensor, Category::OptimizerState);
    }
  }
  return named;
}

MemoryMeter::Report MemoryMeter::Impl::report() const {
  const auto named = named_storages();
  const std::lock_guard lock(mutex_);
  MemoryMeter::Report report;
  report.live_bytes = log_.level();
  report.peak_bytes = log_.peak();
  const auto count = [&](Category category, int64_t bytes) {
    switch (category) {
      case Category::Parameter:
        report.parameters += bytes;
        break;
      case Category::Gradient:
        report.gradients += bytes;
        break;
      case Category::OptimizerState:
        report.optimizer_state += bytes;
        break;
    }
  };
  for (const auto& [data, what] : named) {
    if (!log_.knows(data)) {  // older than the meter
      count(what.category, what.bytes);
    }
  }
  for (const auto& block : log_.alive_at_peak()) {
    const auto found = block.alive ? named.find(block.data) : named.end();
    if (found != named.end()) {
      count(found->second.category, block.bytes);
    } else if (block.saved) {
      report.activations += block.bytes;
    } else {
      (block.alive ? report.outputs : report.workspace) += block.bytes;
    }
  }
  report.before = start_level_ + report.peak_bytes - report.parameters - report.gradients - report.optimizer_state -
                  report.activations - report.workspace - report.outputs;
  return report;
}

MemoryMeter::MemoryMeter() : MemoryMeter(c10::Device(c10::DeviceType::CPU)) {}
MemoryMeter::MemoryMeter(c10::Device device) : impl_(std::make_unique<Impl>(device)) {}
MemoryMeter::~MemoryMeter() = default;

void MemoryMeter::attach(const torch::nn::Module& module) {
  const auto parameters = module.parameters();
  const auto buffers = module.buffers();
  impl_->parameters.insert(impl_->parameters.end(), parameters.begin(), parameters.end());
  impl_->buffers.insert(impl_->buffers.end(), buffers.begin(), buffers.end());
}

void MemoryMeter::attach(const torch::optim::Optimizer& optimizer) { impl_->optimizers.push_back(&optimizer); }

MemoryMeter::Report MemoryMeter::report() const { return impl_->report(); }

}  // namespace snug
