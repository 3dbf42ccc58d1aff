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
  /// Takes the groups that the optimizers have now. Throws ConfigError if two optimizers hold one parameter.
  void take_groups();

  /// If all optimizers allocate before they write, all allocate before the first writes. Otherwise one updates after
  /// the other.
  at::Tensor step(LossClosure closure = nullptr) override;
  /// Gradients must be unscaled already. For an optimizer that does not skip itself, step() waits for `found_inf`.
  void set_gradient_scaling(at::Tensor grad_scale, at::Tensor found_inf) override;
  /// Whether all optimizers allocate before the first writes.
  bool allocate_before_writing() const;
  bool takes(c10::ScalarType dtype) const override;
  bool before_writing(std::function<void()> hook) override;
  bool agrees_across_ranks() const override;
  void name_parameters(const std::vector<std::pair<std::string, at::Tensor>>& names) override;

 private:
  void step_from(size_t first, const at::Tensor& found_inf, const std::function<void()>& before_writing);

  std::vector<torch::optim::Optimizer*> optimizers_;
  at::Tensor found_inf_;
  std::function<void()> before_writing_;
};

}  // namespace snug::detail
