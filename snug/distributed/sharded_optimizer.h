#pragma once
// ShardedOptimizer: every rank keeps the optimizer's state for its share of the parameters only, updates that share,
// and gets the rest from the others. With N ranks the state takes 1/N of the memory, and the update 1/N of the time.
//
//   snug::ShardedOptimizer optimizer(model->parameters(), group, [](const auto& groups) {
//     return std::make_unique<snug::AdamW>(groups, snug::AdamWOptions{.lr = 3e-4});
//   });
//   snug::DataParallel ddp(model, group);
//   ...
//   ddp.forward([&] { return loss_of(model, batch); }).backward();
//   optimizer.step();
//   optimizer.consolidate();  // before a snapshot, on every rank; rank 0 has the whole state then

#include <filesystem>
#include <functional>
#include <memory>
#include <vector>

#include <torch/optim/optimizer.h>

#include "snug/core/gradient_scaling.h"
#include "snug/core/stateful_optimizer.h"
#include "snug/distributed/process_group.h"
#include "snug/optim/fused_optimizer.h"

namespace snug {

/// Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), stage 1. Gradients are whole and the same on all ranks, as
/// DataParallel leaves them. Parameters are cut by bytes, in the middle of a tensor too where the optimizer works
/// element by element, and the result has the same bits as without sharding. Those that are trained when this is made
/// are divided evenly among the ranks, and so are the frozen ones: what is unfrozen later may be unevenly so.
/// param_groups() take new learning rates as ever. add_param_group() is taken in until the first step; else the next
/// call throws ConfigError. All ranks must call the same methods in the same order.
class ShardedOptimizer final : public torch::optim::Optimizer, public GradientScalingAware, public StatefulOptimizer {
 public:
  /// Makes an optimizer of the groups it is given. Called several times, so it must give the same each time.
  using Factory = std::function<std::unique_ptr<FusedOptimizer>(const std::vector<torch::optim::OptimizerParamGroup>&)>;

  /// Throws ConfigError where the factory does, and, on all ranks, where their parameters differ.
  ShardedOptimizer(std::vector<at::Tensor> parameters, std::shared_ptr<ProcessGroup> group, Factory make);
  ShardedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups, std::shared_ptr<ProcessGroup> group,
                   Factory make);
  ~ShardedOptimizer() override;

  /// Updates this rank's share and gathers the others'. Throws as FusedOptimizer::step does, and Error on the other
  /// ranks; then none of them has changed anything. DistributedError if a rank is lost.
  at::Tensor step(LossClosure closure = nullptr) override;

  void set_gradient_scaling(at::Tensor grad_scale, at::Tensor found_inf) override;

  /// Gathers the state on rank `to`, piece by piece, in CPU memory, or where `scratch` is a folder, in files there that
  /// have no name and are no tensor memory. Until the next step, or release(), state_dict() gives it there.
  void consolidate(int to = 0, const std::filesystem::path& scratch = {});
  /// Frees what consolidate() has gathered.
  void release();
  /// The whole state, as the optimizer without sharding has it. Throws ConfigError on a rank that does not have it: see
  /// consolidate(). A group of one has it always.
  StateDict state_dict() const override;
  StateDict state_here() const override;
  /// Takes a whole state, of any number of ranks or of the optimizer without sharding, on every rank; keeps this rank's
  /// share. Throws as FusedOptimizer does; then nothing has changed.
  void load_state_dict(const StateDict& state) override;
  /// Of this rank's share. Like step(), this takes the parameters that a Stepper has put in the place of others.
  int64_t state_bytes_to_come_of(const std::function<bool(const at::Tensor&)>& gets_gradient) const override;
  /// What gathers the parameters: the shares of up to three ranks once more.
  int64_t workspace_bytes() const override;
  bool before_writing(std::function<void()> hook) override;
  /// As the optimizer that the factory makes.
  bool takes(at::ScalarType dtype) const override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  class Impl;
  explicit ShardedOptimizer(std::unique_ptr<Impl> impl);
  void update_own(const at::Tensor& grad_scale, const at::Tensor& found_inf,
                  const std::function<void()>& before_writing);

  std::unique_ptr<Impl> impl_;
};

}  // namespace snug
