#pragma once
// TrainedParameters: what a step may give a gradient to or write: what the model trains, what else the optimizer holds
// (a learned temperature), and, for a model with 16-bit weights, their FP32 masters. Which these are is decided by
// refresh(), at the opening of a step, for all who take part in it.

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

#include "snug/precision.h"
#include "snug/state.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace snug::detail {

class TrainedParameters {
 public:
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

  /// Throws ConfigError if there is nothing to train, if parameters are on several devices, or if the optimizer is of
  /// another model.
  TrainedParameters(torch::nn::Module& model, torch::optim::Optimizer& optimizer);
  /// The optimizer gets the model's parameters back in the place of masters, and keeps its state.
  ~TrainedParameters();
  TrainedParameters(const TrainedParameters&) = delete;
  TrainedParameters& operator=(const TrainedParameters&) = delete;

  /// Throws ConfigError, naming the parameter, if 16-bit weights would be updated, or FP16 gradients unscaled, in 16
  /// bits.
  void check_full_weights(bool is_scaled) const;
  /// Makes masters and puts them into the optimizer in the place of the model's 16-bit weights. Throws ConfigError if
  /// these are not of `precision`'s type, if the optimizer updates these itself, or if it has a state of 16 bits.
  void make_masters(Precision precision);

  /// Looks at model and optimizer again: some parameters may have been frozen, unfrozen, added or moved. Cheap where
  /// none was. True: there are others now.
  bool refresh();
  /// Of all that model and optimizer hold, frozen ones too: an optimizer updates what has a gradient.
  void drop_gradients();
  /// Throws ConfigError, naming it, if a parameter was frozen or unfrozen since refresh().
  void check_unchanged() const;

  /// All of them, with names: each once.
  const NamedTensors& all() const { return all_; }
  /// Those that hold gradients between micro-batches: with masters, these do in the place of the 16-bit weights.
  const NamedTensors& accumulated() const { return accumulated_; }
  /// The one of those that gets the gradient of `parameter`: its master, where it has one.
  const at::Tensor& accumulated_for(const at::Tensor& parameter) const;
  /// Whether drop_gradients() drops that of `leaf`.
  bool holds(const at::Tensor& leaf) const { return held_.contains(leaf.unsafeGetTensorImpl()); }
  /// A hash of the names of all(), the same in each run.
  uint32_t fingerprint() const { return fingerprint_; }
  /// Those that the optimizer holds.
  std::vector<at::Tensor> updated() const;
  c10::Device device() const { return all_.front().second.device(); }
  int64_t gradient_bytes() const;
  /// Of those that are there between micro-batches, whether they are there now or not.
  int64_t bytes_of_all_gradients() const;
  /// Makes those, of zeros, where there are none; or drops all.
  void hold_zero_gradients(bool held);

  /// No effect without masters. See MasterWeights.
  void gather_gradients();
  void scatter();

  /// The model's parameters by name; masters in the place of those that have one.
  std::map<std::string, at::Tensor> full_precision() const;
  StateDict masters_state() const;
  /// Throws CorruptFile, naming the parameter, if one is missing or of another shape; then nothing has changed.
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
  void name_all();
  bool optimizer_takes(at::ScalarType dtype) const;
  void exchange(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to);
  std::string name_of(const at::Tensor& parameter) const;

  torch::nn::Module& model_;
  torch::optim::Optimizer& optimizer_;
  std::optional<MasterWeights> masters_;
  std::unordered_map<const void*, at::Tensor> master_of_;
  std::vector<Seen> seen_;                // by the last refresh
  std::unordered_set<const void*> held_;  // of those
  NamedTensors all_, accumulated_;
  uint32_t fingerprint_ = 0;
};

}  // namespace snug::detail
