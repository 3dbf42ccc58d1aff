#pragma once
// Batch: tensors that belong together along dimension 0; micro_batches: the same data in smaller parts.
//
//   snug::Batch batch{images, labels};                        // 512 of each
//   for (const auto& micro : snug::micro_batches(batch, 100)) // 100, 100, 100, 100, 100, 12
//     ...
//
// For a batch type of your own, provide `int64_t batch_size(const B&)` and `B batch_slice(const B&, int64_t begin,
// int64_t end)` beside it. Two more functions are optional:
// - `B batch_to(const B&, c10::Device)`, if Stepper shall move micro-batches to the model's device;
// - `BatchShape batch_shape(const B&)`, if items differ in size and Stepper has a memory_budget.

#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug {

class Batch {
 public:
  /// Throws ConfigError unless all tensors have the same size along dimension 0.
  Batch(std::initializer_list<at::Tensor> tensors);
  explicit Batch(std::vector<at::Tensor> tensors);

  const at::Tensor& operator[](size_t index) const { return tensors_.at(index); }
  /// Items: the size along dimension 0.
  int64_t size() const { return tensors_.front().size(0); }
  const std::vector<at::Tensor>& tensors() const { return tensors_; }

 private:
  std::vector<at::Tensor> tensors_;
};

int64_t batch_size(const Batch& batch);
/// Items begin to end - 1, as views.
Batch batch_slice(const Batch& batch, int64_t begin, int64_t end);
/// The batch on `device`; the same tensors if they are there already. Host tensors go to another device through pinned
/// memory, without waiting.
Batch batch_to(const Batch& batch, c10::Device device);

/// The size of an item. Together with the number of items it decides how much memory a model needs for them.
struct BatchShape {
  /// Type and sizes of each tensor, without dimension 0.
  std::vector<std::pair<at::ScalarType, std::vector<int64_t>>> tensors = {};

  friend bool operator==(const BatchShape&, const BatchShape&) = default;
};

BatchShape batch_shape(const Batch& batch);

/// Views of `batch` with `size` items each; the last may be smaller, nothing is dropped. Throws ConfigError unless
/// size >= 1.
std::vector<Batch> micro_batches(const Batch& batch, int64_t size);

}  // namespace snug
