#pragma once
// ShardedOptimizer: every rank keeps the optimizer's state only for the rank's share of the parameters, updates the
// share, and gets the rest from the other ranks. With N ranks the state takes 1/N of the memory, and the update 1/N of
// the time.
//
//   snug::ShardedOptimizer optimizer(model->parameters(), group, [](const auto& groups) {
//     return std::make_unique<snug::AdamW>(groups, snug::AdamWOptions{.lr = 3e-4});
//   });
//   snug::DataParallel ddp(model, group);
//   ...
//   ddp.forward([&] { return loss_of(model, batch); }).backward();
//   optimizer.step();
//   group->save_together([&] { snapshots.save(step, parts); });  // on every rank; each writes its share

#include <functional>
#include <memory>
#include <vector>

#include <torch/optim/optimizer.h>

#include "snug/distributed/process_group.h"
#include "snug/fused_optimizer.h"
#include "snug/optimizer.h"

namespace snug::detail {
class Owners;
}

namespace snug {

class DataParallel;

/// Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), stage 1.
/// - Gradients must be whole and the same on all ranks, as after DataParallel. With DataParallelOptions::shard, each
///   gradient is on the parameter's owner only.
/// - Parameters are divided by bytes. If the optimizer works element by element, a tensor may be cut, and the result
///   has the same bits as without sharding.
/// - The parameters trained at construction are divided evenly among the ranks, and so are the frozen parameters.
///   Parameters that are unfrozen later may be divided unevenly.
/// - param_groups() take new learning rates as usual. A group from add_param_group() is accepted until the first step;
///   if a group is added after the first step, the next call throws ConfigError.
/// - All ranks must call the same methods in the same order.
class ShardedOptimizer final : public torch::optim::Optimizer,
                               public GradientScalingAware,
                               public StatefulOptimizer,
                               public MemoryAware,
                               public UpdateAware,
                               public MovableState {
 public:
  /// Makes an optimizer of the given groups. Called several times, so the factory must make the same optimizer each
  /// time.
  using Factory = std::function<std::unique_ptr<FusedOptimizer>(const std::vector<torch::optim::OptimizerParamGroup>&)>;

  /// Throws ConfigError if the factory throws ConfigError, and, on all ranks, if the ranks' parameters differ.
  ShardedOptimizer(std::vector<at::Tensor> parameters, std::shared_ptr<ProcessGroup> group, Factory make);
  ShardedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups, std::shared_ptr<ProcessGroup> group,
                   Factory make);
  ~ShardedOptimizer() override;

  /// Updates this rank's share and gathers the shares of the other ranks, except weights in shards (Shard::Weights). If
  /// a rank fails, the failed rank throws as
  /// FusedOptimizer::step does, the other ranks throw Error, and no rank has changed anything. Throws DistributedError
  /// if a rank is lost.
  at::Tensor step(LossClosure closure = nullptr) override;

  void set_gradient_scaling(at::Tensor grad_scale, at::Tensor found_inf) override;

  /// The whole state, in the form of the optimizer without sharding. On several ranks only inside of
  /// ProcessGroup::save_together: the tensors have no memory (meta), and all ranks write the tensors. Elsewhere throws
  /// ConfigError.
  StateDict state_dict() const override;
  /// Loads a whole state, saved by any number of ranks or by the optimizer without sharding. Every rank must call
  /// load_state_dict(); each rank keeps its own share. Throws as FusedOptimizer does; after an exception nothing has
  /// changed.
  void load_state_dict(const StateDict& state) override;
  std::vector<at::Tensor> state_tensors() const override;
  /// Counts this rank's share only. Like step(), state_bytes_to_come_of() takes in the parameters by which a Stepper
  /// has replaced other parameters.
  int64_t state_bytes_to_come_of(const std::function<bool(const at::Tensor&)>& gets_gradient) const override;
  /// The memory for gathering the parameters: once more the shares of up to three ranks.
  int64_t workspace_bytes() const override;
  /// With StateFile, this rank's share goes to a file of its own.
  bool keep_state_in(const StatePlacement& place) override;
  StatePlacement state_placement() const override;
  bool may_stay_on_device() const override;
  MovableState::PlacementBytes bytes_with_state_in(const StatePlacement& place) const override;
  bool before_writing(std::function<void()> hook) override;
  bool agrees_across_ranks() const override { return true; }
  /// Takes the types that the factory's optimizer takes.
  bool takes(at::ScalarType dtype) const override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  class Impl;
  class Saved;
  explicit ShardedOptimizer(std::unique_ptr<Impl> impl);
  void update_own(const at::Tensor& grad_scale, const at::Tensor& found_inf,
                  const std::function<void()>& before_writing);

  friend class DataParallel;
  bool is_over(const ProcessGroup& group) const;
  bool has_state() const;
  bool follows_another() const;
  /// The parameters in `owners` stay whole, each on the parameter's owner. The optimizer must have no state.
  void follow(std::shared_ptr<const detail::Owners> owners);

  std::unique_ptr<Impl> impl_;
  std::unique_ptr<Saved> saved_;
};

}  // namespace snug
