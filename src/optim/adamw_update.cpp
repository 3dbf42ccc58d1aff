#include "src/optim/adamw_update.h"

#include <atomic>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace snug::detail {

at::Tensor step_count_for(const at::Tensor& parameter) { return at::zeros({}, parameter.options().dtype(at::kFloat)); }

UpdateCounts::UpdateCounts(const std::vector<at::Tensor>& now, const at::Tensor& found_inf)
    : counted(at::_foreach_add(now, 1)),
      after(found_inf.defined() ? at::_foreach_sub(counted, std::vector<at::Tensor>(counted.size(), found_inf))
                                : counted) {}

namespace {

std::atomic<kernels::detail::UpdateLauncher> launcher_of_tests;

kernels::detail::UpdateLauncher launcher_for(c10::Device device) {
  return device.is_privateuseone() ? launcher_of_tests.load() : kernels::detail::cuda_update_launcher(device);
}

kernels::UpdateKind kind_of(const AdamWUpdate& update) {
  const at::ScalarType type = update.parameters.front().scalar_type();
  return type == at::kFloat       ? kernels::UpdateKind::kFloat32
         : update.masters.empty() ? kernels::UpdateKind::kStochastic
         : type == at::kBFloat16  ? kernels::UpdateKind::kBFloat16Masters
                                  : kernels::UpdateKind::kFloat16Masters;
}

const float* number_on_device(const at::Tensor& scalar) {
  return scalar.defined() ? scalar.const_data_ptr<float>() : nullptr;
}

kernels::UpdatedTensor tensor_of(const AdamWUpdate& u, size_t i) {
  return {.parameter = u.parameters[i].mutable_data_ptr(),
          .gradient = u.gradients[i].mutable_data_ptr(),
          .exp_avg = u.exp_avgs[i].mutable_data_ptr<float>(),
          .exp_avg_sq = u.exp_avg_sqs[i].mutable_data_ptr<float>(),
          .master = u.masters.empty() ? nullptr : u.masters[i].mutable_data_ptr<float>(),
          .step = u.steps[i].const_data_ptr<float>(),
          .count = u.parameters[i].numel(),
          .first_element = u.first_elements[i]};
}

}  // namespace

void set_update_launcher(kernels::detail::UpdateLauncher launcher) { launcher_of_tests = launcher; }

bool has_device_update(c10::Device device) { return launcher_for(device) != nullptr; }

void update_on_device(const AdamWUpdate& update) {
  const c10::Device device = update.parameters.front().device();
  const c10::DeviceGuard guard(device);
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  kernels::UpdateTable empty(kind_of(update), kernel_step(update.options, 1, {}));
  empty.grad_scale = number_on_device(update.grad_scale);
  empty.found_inf = number_on_device(update.found_inf);
  std::vector<kernels::UpdateTable> tables;
  for (size_t i = 0; i < update.parameters.size(); ++i) {
    if (i % kernels::UpdateTable::kMostTensors == 0) {
      tables.push_back(empty);
    }
    tables.back().add(tensor_of(update, i));
  }
  for (const kernels::UpdateTable& table : tables) {
    launcher_for(device)(table, stream);
  }
}

}  // namespace snug::detail
