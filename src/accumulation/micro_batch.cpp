#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "snug/accumulation.h"
#include "snug/core.h"

namespace snug {

Batch::Batch(std::initializer_list<at::Tensor> tensors) : Batch(std::vector<at::Tensor>(tensors)) {}

Batch::Batch(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
  if (tensors_.empty()) {
    throw ConfigError("Batch: there are no tensors in it");
  }
  for (const at::Tensor& tensor : tensors_) {
    if (!tensor.defined() || tensor.dim() == 0) {
      throw ConfigError("Batch: every tensor needs a dimension 0, one entry for each item");
    }
    if (tensor.size(0) != tensors_.front().size(0)) {
      throw ConfigError(
          fmt::format("Batch: sizes along dimension 0 differ: {} and {}", tensors_.front().size(0), tensor.size(0)));
    }
  }
}

Batch Batch::slice(int64_t begin, int64_t end) const {
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors_) {
    parts.push_back(tensor.slice(0, begin, end));
  }
  return Batch(std::move(parts));
}

Batch Batch::to(c10::Device device) const {
  std::vector<at::Tensor> moved;
  for (const at::Tensor& tensor : tensors_) {
    const bool from_host = tensor.device().is_cpu() && !device.is_cpu();
    moved.push_back((from_host ? tensor.pin_memory() : tensor).to(device, /*non_blocking=*/from_host));
  }
  return Batch(std::move(moved));
}

Batch::Shape Batch::shape() const {
  Shape shape;
  for (const at::Tensor& tensor : tensors_) {
    shape.tensors.emplace_back(tensor.scalar_type(), tensor.sizes().slice(1).vec());
  }
  return shape;
}

std::vector<Batch> micro_batches(const Batch& batch, int64_t size) {
  if (size < 1) {
    throw ConfigError(fmt::format("micro_batches: size is {}; it must be >= 1", size));
  }
  std::vector<Batch> parts;
  for (int64_t begin = 0; begin < batch.size(); begin += size) {
    parts.push_back(batch.slice(begin, std::min(begin + size, batch.size())));
  }
  return parts;
}

}  // namespace snug
