#pragma once
// Tensors that autograd saves before an operator fills them: RReLU saves its noise and then calls the operator that
// fills the noise.

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "src/activations/operator_traits.h"
#include "src/activations/region_values.h"
#include "src/memory/operator_mode.h"

namespace snug::detail {

class FilledSaves {
 public:
  using Filled = std::function<void(const at::Tensor&)>;

  /// Autograd saves the tensor. The object keeps the tensor until the next operator begins.
  void add(const at::Tensor& tensor, Filled filled) { saves_.push_back({tensor, std::move(filled)}); }

  /// The next operator begins. Returns the saves that the operator writes, and forgets the others.
  FilledSaves take(const Arguments& arguments, const std::vector<size_t>& written) {
    FilledSaves taken = std::exchange(*this, {});
    std::erase_if(taken.saves_, [&](const Save& save) {
      bool is_written = false;
      for (const size_t i : written) {
        visit_tensors_in(arguments[i], [&](const at::Tensor& tensor) {
          is_written = is_written || memory_of(tensor) == memory_of(save.tensor);
        });
      }
      return !is_written;
    });
    return taken;
  }

  /// The operator is over: calls `filled` of each save.
  void tell() const {
    const UnseenOperators unseen;
    for (const Save& save : saves_) {
      save.filled(save.tensor);
    }
  }

 private:
  struct Save {
    at::Tensor tensor;
    Filled filled;
  };
  std::vector<Save> saves_;
};

}  // namespace snug::detail
