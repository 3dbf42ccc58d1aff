#pragma once
// TrainedParameters: the parameters that a step may write or give a gradient: the parameters that the model trains,
// further parameters of the optimizer (a learned temperature), and, for a model with 16-bit weights, the FP32 masters.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include "snug/precision.h"
#include "snug/state.h"
#include "src/memory/late_writes.h"

namespace torch::optim {
class Optimizer;
}

namespace snug::detail {

/// A module in the place of a model, for parameters that are in no module.
class LooseParameters final : public torch::nn::Module {
 public:
  explicit LooseParameters(std::vector<at::Tensor> parameters) : never_held_(std::move(parameters)) {}

  /// Registers what the optimizer holds, and the other parameters that no optimizer has held before.
  void follow(const std::vector<at::Tensor>& held);

 private:
  std::vector<at::Tensor> never_held_;
};

class TrainedParameters {
 public:
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

  /// Throws ConfigError if nothing can be trained, if parameters are on several devices, or if the optimizer is of
  /// another model.
  TrainedParameters(torch::nn::Module& model, torch::optim::Optimizer& optimizer);
  /// The optimizer gets the model's parameters back in the place of masters, and keeps the optimizer state.
  ~TrainedParameters();
  TrainedParameters(const TrainedParameters&) = delete;
  TrainedParameters& operator=(const TrainedParameters&) = delete;

  /// Throws ConfigError, naming the parameter, if 16-bit weights would be updated, or FP16 gradients unscaled, in 16
  /// bits.
  void check_full_weights(bool is_scaled) const;
  /// Makes masters and puts the masters into the optimizer in the place of the model's 16-bit weights. Throws
  /// ConfigError:
  /// - if `precision` is Float32, or no parameter of the model has 16 bits;
  /// - if the 16-bit weights are not of `precision`'s type;
  /// - if an optimizer updates 16-bit weights itself, or has a state of 16 bits.
  void make_masters(Precision precision);

  /// Looks at model and optimizer again: some parameters may have been frozen, unfrozen, added or moved. Cheap without
  /// such a change. True: the set has changed.
  bool refresh();
  /// Drops the gradients of all parameters that model and optimizer hold, frozen parameters too: an optimizer updates
  /// every parameter with a gradient.
  void drop_gradients();
  /// Throws ConfigError, naming the parameter, if a parameter was frozen or unfrozen since refresh().
  void check_unchanged() const;

  /// All parameters, with names, each parameter once.
  const NamedTensors& all() const { return all_; }
  /// The parameters that hold gradients between micro-batches, with masters in the place of 16-bit weights.
  const NamedTensors& accumulated() const { return accumulated_; }
  /// The parameters that get gradients from backward, each with the parameter of accumulated() that gets the sum.
  const std::vector<std::pair<at::Tensor, at::Tensor>>& leaves() const { return leaves_; }
  /// The parameter of accumulated() that gets the gradient of `parameter`: the master, if `parameter` has a master.
  const at::Tensor& accumulated_for(const at::Tensor& parameter) const;
  /// Whether drop_gradients() drops the gradient of `leaf`.
  bool holds(const at::Tensor& leaf) const { return held_.contains(leaf.unsafeGetTensorImpl()); }
  /// A hash of the names of all(), the same in each run.
  uint32_t fingerprint() const { return fingerprint_; }
  /// The parameters that the optimizer holds.
  std::vector<at::Tensor> updated() const;
  /// Those of updated() that are trained, each once. A master has the name of the model's weight.
  NamedTensors updated_by_name() const;
  c10::Device device() const { return all_.front().second.device(); }
  int64_t gradient_bytes() const;
  /// Bytes of the gradients that exist between micro-batches, whether the gradients exist now or not.
  int64_t bytes_of_all_gradients() const;
  /// Makes missing gradients of accumulated(), of zeros.
  void hold_zero_gradients();

  /// No effect without masters. See MasterWeights.
  void gather_gradients();
  void scatter();

  /// The model's parameters by name, with masters in the place of 16-bit weights.
  std::map<std::string, at::Tensor> full_precision() const;
  /// Throws CorruptFile, naming the parameter, if a master is missing or of another shape; then nothing has changed.
  void load_masters(const StateDict& saved);

 private:
  struct Seen {
    at::Tensor parameter;
    bool requires_grad;
    c10::Device device;

    bool operator==(const Seen& other) const {
      return parameter.is_same(other.parameter) && requires_grad == other.requires_grad && device == other.device;
    }
  };

  std::vector<Seen> look() const;
  bool is_taken(const at::Tensor& parameter) const;
  void name_all();
  static void exchange(torch::optim::Optimizer& optimizer, const std::vector<at::Tensor>& from,
                       const std::vector<at::Tensor>& to);
  std::string name_of(const at::Tensor& parameter) const;

  torch::nn::Module& model_;
  torch::optim::Optimizer& optimizer_;
  std::optional<MasterWeights> masters_;
  std::unordered_map<const void*, at::Tensor> master_of_;
  std::vector<Seen> seen_;                // by the last refresh
  std::unordered_set<const void*> held_;  // the parameters in seen_
  NamedTensors all_, accumulated_;
  std::vector<std::pair<at::Tensor, at::Tensor>> leaves_;
  uint32_t fingerprint_ = 0;
  LateWrites late_;  // of 16-bit weights, after their masters' updates
};

}  // namespace snug::detail
