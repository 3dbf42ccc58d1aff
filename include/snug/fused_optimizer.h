#pragma once
// FusedOptimizer: the common base of snug's optimizers. Each optimizer updates all parameters of a group in one kernel
// call, unscales gradients and skips on the device, and allocates and checks everything before writing anything. The
// state has Python's names. For an optimizer of your own, see snug/optimizer.h.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include "snug/optimizer.h"

namespace snug {
namespace detail {
struct OptionRules;
class SpillCalls;
}  // namespace detail

/// A torch::optim::Optimizer, so torch's schedulers work on a FusedOptimizer. With a GradScaler, unscaling and skipping
/// happen in the kernel and nothing waits for the device. A skipped step does not change parameters and state,
/// including the step count of bias correction.
class FusedOptimizer : public torch::optim::Optimizer,
                       public GradientScalingAware,
                       public StatefulOptimizer,
                       public MemoryAware,
                       public UpdateAware,
                       public MovableState {
 public:
  /// Adds a group; a group without options gets the defaults. Throws ConfigError, naming the parameter or option, as
  /// the constructor does; then nothing has changed. add_param_group is not virtual in torch: a call through a
  /// reference to torch::optim::Optimizer runs torch's function, which checks less, and gives Muon's groups the
  /// defaults instead of the groups' options.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// Updates every parameter that has a gradient. All memory is allocated, and all shapes, types and devices are
  /// checked (ConfigError), before anything is written: an error leaves parameters and state as before. Returns the
  /// closure's loss, if a closure is given. A closure together with a GradScaler is a ConfigError.
  at::Tensor step(LossClosure closure = nullptr) final;

  /// Updates one parameter of this optimizer at once: see StepInBackward. Throws as step() does.
  void step_parameter(const at::Tensor& parameter);

  void set_gradient_scaling(at::Tensor grad_scale, at::Tensor found_inf) final;

  /// The number of elements at whose multiples a parameter may be cut. The parts are then updated as separate
  /// parameters, with the same bits. 0: a parameter must stay whole. 64 keeps vectors and cache lines whole, and is
  /// right for every element-wise kernel.
  virtual int64_t shard_multiple() const { return 64; }

  /// For an optimizer of parts of parameters, if some parts are elsewhere: sets the number of each part's first element
  /// among the elements of all parts. Random numbers depend on the number.
  void number_elements(const std::vector<uint64_t>& first);

  /// With StateOnHost, the CPU's kernels update parameters of all devices: gradients and parameters pass through the
  /// window, and step() gives the bits that the optimizer gives on the CPU. With StateFile the same holds, and step()
  /// reads and writes the state of a parameter while the parameters before and after are updated. Room in the file is
  /// taken before anything is written.
  /// - A full disk leaves everything as before. So does a first read that fails.
  /// - A later read, write or copy that fails leaves a half-made update: step() throws Error, also when called again,
  ///   until load_state_dict() has brought back a state.
  /// - With StateOnHost, the update of a weight that is on the host comes when the weight is used next. If the update
  ///   fails, the operator or call that uses the weight throws Error, and the update is half made.
  ///
  /// Throws ConfigError for a window that is too small. Throws Error if the file cannot be made, written or read, and
  /// as an allocation does. After an exception nothing has changed. A relative directory starts at the program's
  /// directory at the time of the call, even if the program's directory changes later. The state_dict() of an optimizer
  /// with the state in a file lies in the file, not in tensor memory.
  bool keep_state_in(const StatePlacement& place) final;
  /// The same with other system calls, for tests.
  void keep_state_in(StatePlacement place, detail::SpillCalls& calls);
  StatePlacement state_placement() const final;
  MovableState::PlacementBytes bytes_with_state_in(const StatePlacement& place) const final;

  std::vector<at::Tensor> state_tensors() const final;
  int64_t state_bytes_to_come_of(const std::function<bool(const at::Tensor&)>& gets_gradient) const final;

  bool before_writing(std::function<void()> hook) final;

  /// Names for error messages, such as a module's named_parameters(); without names, messages give the index.
  void name_parameters(const std::vector<std::pair<std::string, at::Tensor>>& names) final;

  /// The state under Python's names:
  /// - `state.INDEX.NAME` is a state tensor.
  /// - `param_groups.GROUP.OPTION` is an option of a group. `params` has the indices of the group's parameters.
  /// - A list or tuple in Python (param_groups, betas, params) is a StateDict with the names 0, 1, ...
  ///
  /// As in Python, the dictionary takes no memory. The tensors, counts of steps too, are the state itself, and show the
  /// changes of later steps. Options are numbers with the current values. To keep the current state, clone the tensors,
  /// or save the dictionary at once, as torch::save and snapshots do.
  /// load_state_dict(), and every call that moves the state (keep_state_in(), a plan of a Stepper with
  /// BudgetOptions::offload), replace the tensors of the state; the tensors in earlier dictionaries then stay as they
  /// are. Tensors that lie in a file are for reading: the optimizer does not see what a program writes into the
  /// tensors, and written elements no longer show the state.
  StateDict state_dict() const final;
  /// Copies the state. Takes Python's states too, except for Python's options that are None. Ignores Python's options
  /// about the way a step is computed (foreach, fused, capturable). Throws ConfigError for options that are not
  /// supported, such as maximize, and CorruptFile, naming the parameter, if the number of parameters or a shape
  /// differs; then nothing has changed.
  void load_state_dict(const StateDict& state) final;

  /// torch's archive with the state_dict(), for torch::save and torch::load. Loading checks like load_state_dict().
  void save(torch::serialize::OutputArchive& archive) const final;
  void load(torch::serialize::InputArchive& archive) final;

 protected:
  // The rest is for snug's own optimizers. The types of the rest are not public.
  struct ParameterState;
  struct Work;

  FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults, const detail::OptionRules& rules);
  /// Call finish_construction at the end of the constructor. Takes the options of the groups, and checks options and
  /// parameters.
  void finish_construction(const std::vector<torch::optim::OptimizerParamGroup>& given);

  /// Throws ConfigError, naming the parameter, if the parameter cannot be in a group with the options.
  virtual void check_in_group(const at::Tensor& /*parameter*/,
                              const torch::optim::OptimizerOptions& /*options*/) const {}
  /// For the error message: why a type is not supported (see takes()), and the cure.
  virtual std::string_view why_not() const;
  /// Adds the tensors of a first state, which begin as zeros, except for copied_state(). Each tensor is a scalar, or
  /// has one element for each element of the parameter, or one element for each state_multiple() elements of the
  /// parameter.
  virtual void make_state(ParameterState& state, const at::Tensor& parameter,
                          const torch::optim::OptimizerOptions& options) const = 0;
  /// The name of a state tensor in the parameter's shape that exists only with some options. A saved state may have or
  /// lack the tensor.
  virtual std::optional<std::string_view> optional_state() const { return std::nullopt; }
  /// The name of a state tensor that begins as a copy of its parameter.
  virtual std::optional<std::string_view> copied_state() const { return std::nullopt; }
  /// The number of elements at whose multiples a parameter may be cut together with the parameter's state. 0: the
  /// parameter must stay whole.
  virtual int64_t state_multiple() const { return shard_multiple(); }
  /// False: the state stays on the parameters' device. An update in blocks prepares all blocks first, so the blocks'
  /// workspaces add up.
  virtual bool state_may_leave() const { return true; }
  /// Allocates all memory of the update. The returned function only writes: into parameters, gradients and the tensors
  /// of the states. The tensors stay the same tensors, because state_dict() has given the tensors away.
  virtual std::function<void()> prepare(const Work& work) const = 0;

  /// Removes repeated tensors: parameters() of a model names the parameters of a shared module once for each use.
  static std::vector<at::Tensor> without_repeats(std::vector<at::Tensor> parameters);

  std::string describe(const at::Tensor& parameter) const;
  /// Whether all parameters are on the CPU.
  bool is_on_cpu() const;

 private:
  class Update;
  class StateOutside;

  std::string_view name() const;
  void take_options(torch::optim::OptimizerParamGroup& group, const torch::optim::OptimizerParamGroup& given) const;
  void check_groups() const;
  void check_options(const torch::optim::OptimizerOptions& options) const;
  void check_parameter(const at::Tensor& parameter) const;
  void check_type(const at::Tensor& parameter) const;
  ParameterState state_without_memory(const at::Tensor& parameter, const torch::optim::OptimizerOptions& options) const;
  std::unique_ptr<ParameterState> copy_of_state(const StateDict& saved, const at::Tensor& parameter,
                                                const torch::optim::OptimizerOptions& options,
                                                StateOutside* outside) const;
  std::vector<ParameterState> states_to_be() const;
  void bring_state_back();

  const detail::OptionRules* rules_;
  at::Tensor grad_scale_;
  at::Tensor found_inf_;
  std::function<void()> before_writing_;
  std::unordered_map<const void*, std::string> names_;
  std::unordered_map<const void*, uint64_t> first_elements_;  // set by number_elements()
  std::shared_ptr<StateOutside> outside_;                     // not shared; null: the state is on the device
  std::string half_made_;                                     // why an update stopped midway; empty: no update did
};

}  // namespace snug
