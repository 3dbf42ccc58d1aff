#pragma once
// MasterWeights: FP32 copies of FP16 or BF16 parameters, for any optimizer to update. A step smaller than half of a
// weight's last place (1 part in 256 for BF16) would be rounded away in the weight itself; in the master it counts.
//
//   model->to(torch::kBFloat16);
//   snug::MasterWeights masters(model->parameters());
//   torch::optim::SGD optimizer(masters.parameters(), 0.1);
//   loss.backward();
//   masters.gather_gradients();    // after each micro-batch: sums them in FP32
//   optimizer.step();
//   masters.scatter();
//   optimizer.zero_grad();

#include <vector>

#include <ATen/core/Tensor.h>

namespace snug {

/// Micikevicius et al. 2018, arXiv:1710.03740, section 3.1. Parameters that are FP32 or FP64 already are their own
/// masters.
class MasterWeights {
 public:
  /// `low`: leaf tensors of a model; a tensor that is given twice counts once. Throws ConfigError, naming the index,
  /// for types that are not floating point, or if `low` is empty.
  explicit MasterWeights(std::vector<at::Tensor> low);

  /// The masters, in the order of `low`: the parameters for the optimizer.
  const std::vector<at::Tensor>& parameters() const { return masters_; }
  /// The 16-bit (or own) parameters, in the same order.
  const std::vector<at::Tensor>& low() const { return low_; }

  /// Adds the gradients of the 16-bit parameters to those of their masters, in FP32, and drops them. Sparse gradients
  /// stay sparse, coalesced.
  void gather_gradients();

  /// Rounds the masters into the 16-bit parameters. If the optimizer skipped its step, this writes the same values
  /// again.
  void scatter();

 private:
  std::vector<at::Tensor> low_;
  std::vector<at::Tensor> masters_;
};

}  // namespace snug
