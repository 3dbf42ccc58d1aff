#pragma once
// JoinedOptimizers: several optimizers that update together, as one optimizer. Groups, options and state stay with the
// optimizers, so schedules and snapshots of each go on.

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include "snug/optimizer.h"

namespace snug::detail {

class JoinedOptimizers final : public torch::optim::Optimizer, public GradientScalingAware, public UpdateAware {
 public:
  /// Not owned. Throws ConfigError for a null pointer, or if two optimizers hold one parameter.
  explicit JoinedOptimizers(std::vector<torch::optim::Optimizer*> optimizers);

  const std::vector<torch::optim::Optimizer*>& optimizers() const { return optimizers_; }
  /// The optimizers that allocate before they write (UpdateAware::before_writing), and skip themselves.
  const std::vector<torch::optim::Optimizer*>& early() const { return early_; }
  /// The other optimizers.
  const std::vector<torch::optim::Optimizer*>& late() const { return late_; }
  /// Takes the groups that the optimizers have now. Throws ConfigError if two optimizers hold one parameter.
  void take_groups();

  /// The early optimizers allocate before any optimizer writes. Then the late optimizers update, one after the other.
  at::Tensor step(LossClosure closure = nullptr) override;
  /// Gradients must be unscaled already. For an optimizer that does not skip itself, step() waits for `found_inf`.
  void set_gradient_scaling(at::Tensor grad_scale, at::Tensor found_inf) override;
  /// True also with late optimizers, if the bytes of their updates are known. `hook` is called after the early
  /// optimizers have allocated, and before any optimizer writes.
  bool before_writing(std::function<void()> hook) override;
  bool agrees_across_ranks() const override;
  void name_parameters(const std::vector<std::pair<std::string, at::Tensor>>& names) override;

 private:
  void step_from(size_t first, const at::Tensor& found_inf, const std::function<void()>& before_writing);

  std::vector<torch::optim::Optimizer*> optimizers_, early_, late_;
  at::Tensor found_inf_;
  std::function<void()> before_writing_;
};

}  // namespace snug::detail
