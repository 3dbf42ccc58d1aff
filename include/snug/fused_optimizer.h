#pragma once
// FusedOptimizer: the common base of snug's optimizers. Each updates all parameters of a group in one kernel call,
// unscales gradients and skips on the device, allocates and checks everything before it writes anything, and keeps its
// state under Python's names. To write another one, derive from it and define the state and its update.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include "snug/stateful_optimizer.h"

namespace snug {
namespace detail {
class SpillCalls;
}

/// A torch::optim::Optimizer, so torch's schedulers work on it. With a GradScaler, unscaling and skipping happen in the
/// kernel and nothing waits for the device. A skipped step does not change parameters and state, including the step
/// count of bias correction.
class FusedOptimizer : public torch::optim::Optimizer, public GradientScalingAware, public StatefulOptimizer {
 public:
  /// An optimizer's name, for messages, and the functions that check and save its options.
  struct OptionRules {
    std::string_view optimizer;
    /// Throws ConfigError if the options are of another optimizer, or out of range.
    void (*check)(std::string_view optimizer, const torch::optim::OptimizerOptions& options);
    /// Under Python's names.
    StateDict (*to_state)(const torch::optim::OptimizerOptions& options);
    /// Throws ConfigError for options that are not offered.
    std::unique_ptr<torch::optim::OptimizerOptions> (*from_state)(std::string_view optimizer, const StateDict& state);
    /// Whether the defaults are of one of torch's types: then what a group leaves at its default is theirs, as torch
    /// does it.
    bool are_torchs = true;
  };

  /// Adds a group; without options it gets the defaults. Throws ConfigError, naming the parameter or option, as the
  /// constructor does; then nothing has changed. Not virtual in torch: through a reference to torch::optim::Optimizer
  /// it is torch's, which checks less, and gives Muon's groups the defaults in the place of their options.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);

  /// Updates every parameter that has a gradient. All memory is allocated, and all shapes, types and devices are
  /// checked (ConfigError), before anything is written: an error leaves parameters and state as they were. Returns the
  /// closure's loss, if there is one; a closure together with a GradScaler is a ConfigError.
  at::Tensor step(LossClosure closure = nullptr) final;

  /// Updates one parameter that this optimizer holds, at once: see StepInBackward. Throws as step() does.
  void step_parameter(const at::Tensor& parameter);

  void set_gradient_scaling(at::Tensor grad_scale, at::Tensor found_inf) final;

  /// The number of elements at whose multiples a parameter may be cut. Its parts are then updated as separate
  /// parameters, with the same bits. 0: it must stay whole. 64 keeps vectors and cache lines whole; it is right for
  /// every element-wise kernel.
  virtual int64_t shard_multiple() const { return 64; }

  /// For an optimizer of parts, some of which are elsewhere: sets the number of each part's first element among those
  /// of all. Random numbers depend on it.
  void number_elements(const std::vector<uint64_t>& first);

  /// For parameters on the CPU. What step() needs of the state is read and written while parameters before and after it
  /// are updated. Room in the file is taken before anything is written: a full disk leaves all as it was, and so does a
  /// first read that fails. A later read or write that fails leaves an update that is half made: step() throws Error,
  /// also when it is called again, until load_state_dict() has brought back a state. Throws ConfigError for parameters
  /// elsewhere and for a window that is too small, Error if the file cannot be made or written; then nothing has
  /// changed. A relative directory is that of the call, whatever the program's directory is later. The state_dict() of
  /// such an optimizer lies in the file, not in tensor memory.
  bool keep_state_in(const StateFile& file) final;
  /// Tests give other system calls.
  void keep_state_in(const StateFile& file, detail::SpillCalls& calls);
  /// Throws as an allocation does, and Error if the file cannot be read; then nothing has changed.
  void keep_state_in_memory() final;
  bool is_state_in_file() const final { return in_file_ != nullptr; }
  StateFileBytes bytes_with_state_in(const StateFile& file) const final;

  int64_t state_bytes_to_come_of(const std::function<bool(const at::Tensor&)>& gets_gradient) const final;

  bool before_writing(std::function<void()> hook) final;

  /// Names for error messages, such as a module's named_parameters(); otherwise they give the index.
  void name_parameters(const std::vector<std::pair<std::string, at::Tensor>>& names);

  /// Python's names: `state.INDEX.NAME`, of a state tensor, and `param_groups.GROUP.OPTION`, a group's parameters by
  /// their indices under params. Where Python has a list or tuple (param_groups, betas, params), a StateDict with the
  /// names 0, 1, ... As in Python it takes no memory: its tensors, counts of steps too, are the state itself, and show
  /// what later steps make of it; options are numbers, as they are now. To keep the state of now, clone the tensors, or
  /// save it at once, as torch::save and snapshots do. load_state_dict(), and whatever moves the state
  /// (keep_state_in(), keep_state_in_memory(), a plan of a Stepper with StepperOptions::offload), puts other tensors in
  /// the place of these, which then stay as they are. Those that lie in a file are for reading: the optimizer does not
  /// see what is written into them, and where it was written they no longer show the state.
  StateDict state_dict() const final;
  /// Copies the state. Takes Python's states too, except for their options that are None, and ignores those of their
  /// options that say how a step is computed (foreach, fused, capturable). Throws ConfigError for options that are not
  /// supported, such as maximize, and CorruptFile, naming the parameter, if the number of parameters or a shape
  /// differs; then nothing has changed.
  void load_state_dict(const StateDict& state) final;

  /// torch's archive, for torch::save and torch::load: the state_dict() in it. Loading checks like load_state_dict.
  void save(torch::serialize::OutputArchive& archive) const final;
  void load(torch::serialize::InputArchive& archive) final;

 protected:
  /// The place of a tensor in the file, and a sum for each piece that was written.
  struct InFile {
    int64_t offset = 0;
    std::vector<std::optional<uint64_t>> sums = {};
  };

  /// The state of one parameter, under Python's names.
  struct ParameterState : torch::optim::OptimizerCloneableParamState<ParameterState> {
    std::vector<std::pair<std::string_view, at::Tensor>> tensors;  // the names are literals of the optimizer's
    at::Tensor made_for;  // the parameter's shape, strides and type without its values
    c10::Device device{c10::kCPU};
    bool is_fresh = true;                        // no update has used it yet; then it is not saved either
    std::map<std::string_view, InFile> in_file;  // those that are there are on the meta device here
    int64_t piece = 0;                           // how many of the parameter's elements are in a piece there

    const at::Tensor& at(std::string_view name) const;
    at::Tensor& at(std::string_view name) { return const_cast<at::Tensor&>(std::as_const(*this).at(name)); }
    bool contains(std::string_view name) const;
  };

  /// The parameters of one group, device and dtype that are updated together.
  struct Work {
    const torch::optim::OptimizerOptions* options;
    std::vector<at::Tensor> parameters;
    std::vector<at::Tensor> gradients;  // each lies in memory as its parameter does
    std::vector<ParameterState*> states;
    std::vector<uint64_t> first_elements;  // the number of each parameter's first among those of all of the optimizer's
    at::Tensor grad_scale;                 // gradients are to be divided by it; undefined: by nothing
    at::Tensor found_inf;                  // reads 1: nothing is to be changed; undefined: go on

    std::vector<at::Tensor> states_named(std::string_view name) const;
  };

  FusedOptimizer(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                 std::unique_ptr<torch::optim::OptimizerOptions> defaults, const OptionRules& rules);
  /// Call it at the end of the constructor: takes the options of the groups, and checks these and the parameters.
  void finish_construction(const std::vector<torch::optim::OptimizerParamGroup>& given);

  /// Throws ConfigError, naming the parameter, if it cannot be in a group with these options.
  virtual void check_in_group(const at::Tensor& /*parameter*/,
                              const torch::optim::OptimizerOptions& /*options*/) const {}
  /// For the error message: why a type is not supported (see takes()), and the cure.
  virtual std::string_view why_not() const;
  /// Adds the tensors of a first state, which begin as zeros but for copied_state(). Each is a scalar, or has an
  /// element for each of the parameter's, or for each state_multiple() of them.
  virtual void make_state(ParameterState& state, const at::Tensor& parameter,
                          const torch::optim::OptimizerOptions& options) const = 0;
  /// The name of a state tensor in the parameter's shape that exists only with some options. A saved state may have it
  /// or not.
  virtual std::optional<std::string_view> optional_state() const { return std::nullopt; }
  /// The name of a state tensor that begins as a copy of its parameter.
  virtual std::optional<std::string_view> copied_state() const { return std::nullopt; }
  /// The number of elements at whose multiples a parameter may be cut together with the state that it has. 0: it must
  /// stay whole.
  virtual int64_t state_multiple() const { return shard_multiple(); }
  /// False: keep_state_in() does nothing. An update in blocks prepares all of them first, so their workspaces add up.
  virtual bool state_may_leave() const { return true; }
  /// Allocates all memory of the update. The returned function only writes: into parameters, gradients and the tensors
  /// of the states, which stay the same tensors, since state_dict() has given them away.
  virtual std::function<void()> prepare(const Work& work) const = 0;

  /// Removes repeated tensors: parameters() of a model names those of a shared module once for each use.
  static std::vector<at::Tensor> without_repeats(std::vector<at::Tensor> parameters);

  std::string_view name() const { return rules_.optimizer; }
  std::string describe(const at::Tensor& parameter) const;

 private:
  struct Update;
  class StateInFile;

  struct Place {
    uint64_t number;         // among all of the optimizer's
    uint64_t first_element;  // its number among those of all
  };
  Place place_of(const at::Tensor& parameter) const;

  void take_options(torch::optim::OptimizerParamGroup& group, const torch::optim::OptimizerParamGroup& given) const;
  void check_groups() const;
  void check_options(const torch::optim::OptimizerOptions& options) const { rules_.check(name(), options); }
  void check_parameter(const at::Tensor& parameter) const;
  void check_type(const at::Tensor& parameter) const;
  void check_gradient(const at::Tensor& parameter) const;
  void check_state(const ParameterState& state, const at::Tensor& parameter) const;
  ParameterState state_without_memory(const at::Tensor& parameter, const torch::optim::OptimizerOptions& options) const;
  std::unique_ptr<ParameterState> first_state(const at::Tensor& parameter,
                                              const torch::optim::OptimizerOptions& options) const;
  std::unique_ptr<ParameterState> copy_of_state(const StateDict& saved, const at::Tensor& parameter,
                                                const torch::optim::OptimizerOptions& options,
                                                StateInFile* in_file) const;
  void make_update(const std::function<void(Update&)>& collect_all, const std::function<void()>& before_writing);
  void collect(Update& update, const torch::optim::OptimizerParamGroup& group, at::TensorList parameters,
               uint64_t first_element, const at::Tensor& grad_scale, const at::Tensor& found_inf);
  void place_new_tensors(ParameterState& state, const at::Tensor& parameter,
                         const torch::optim::OptimizerOptions& options);
  void commit(Update& update);
  void stream(Update& update);
  std::vector<ParameterState> states_to_be() const;

  OptionRules rules_;
  at::Tensor grad_scale_;
  at::Tensor found_inf_;
  std::function<void()> before_writing_;
  std::unordered_map<const void*, std::string> names_;
  std::unordered_map<const void*, uint64_t> first_elements_;  // by number_elements()
  std::shared_ptr<StateInFile> in_file_;                      // not shared; null: the state is in memory
  std::string half_made_;                                     // why an update stopped midway; empty: none did
};

}  // namespace snug
