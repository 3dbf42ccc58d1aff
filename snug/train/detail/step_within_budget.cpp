#include "snug/train/detail/step_within_budget.h"

#include <ATen/ATen.h>

namespace snug::detail {

void StepBackup::take() {
  const at::NoGradGuard no_grad;
  generators_ = RngState::capture();
  buffers_ = model_.buffers();
  copies_.resize(buffers_.size());
  for (size_t i = 0; i < buffers_.size(); ++i) {
    if (!copies_[i].defined() || !copies_[i].sizes().equals(buffers_[i].sizes()) ||
        copies_[i].dtype() != buffers_[i].dtype()) {
      copies_[i] = at::empty_like(buffers_[i]);
    }
    copies_[i].copy_(buffers_[i]);
  }
}

void StepBackup::restore() const {
  const at::NoGradGuard no_grad;
  generators_->restore();
  for (size_t i = 0; i < buffers_.size(); ++i) {
    at::Tensor(buffers_[i]).copy_(copies_[i]);
  }
}

int64_t StepBackup::bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& copy : copies_) {
    bytes += static_cast<int64_t>(copy.nbytes());
  }
  return bytes;
}

}  // namespace snug::detail
