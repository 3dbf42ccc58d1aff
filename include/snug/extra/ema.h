#pragma once
// Ema: an exponential moving average of a model's weights, which often tests better than the weights themselves.
//
//   snug::Ema ema(model->parameters(), {.decay = 0.999});
//   if (result.stepped()) ema.update();                 // after each optimizer step that was not skipped
//   {
//     const snug::Ema::Scope averaged(ema);             // the model has the averages until the brace
//     evaluate(model);
//   }

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/state.h"

namespace snug {

struct EmaOptions {
  double decay = 0.999;  ///< the part of the average that remains at an update, from 0 to 1
  bool warm_up =
      false;  ///< decay of the update after the n-th is min(decay, (1 + n) / (10 + n)), so that short runs average less
};

/// Polyak & Juditsky 1992 (doi:10.1137/0330046), with exponential weights: average = decay * average + (1 - decay) *
/// weight. Agrees to the bit with Python's torch.optim.swa_utils.AveragedModel and get_ema_multi_avg_fn(decay) for
/// FP32: the first update copies, so that random initial weights are not averaged. 16-bit weights have FP32 averages:
/// BF16 rounds away a change by less than 1 part in 256, and with a decay of 0.999 every change. The warm-up is the
/// same as in TensorFlow's ExponentialMovingAverage(num_updates). Memory: 4 bytes a weight, 8 for FP64. Buffers (the
/// running mean of a BatchNorm) are not averaged.
class Ema {
 public:
  /// `parameters`: tensors of a model; a tensor that is given twice counts once. Ema holds copies of the parameters'
  /// values until the first update. Throws ConfigError if `parameters` is empty, for types other than FP16, BF16, FP32
  /// and FP64 (naming the index), or unless 0 <= decay <= 1.
  explicit Ema(std::vector<at::Tensor> parameters, EmaOptions options = {});
  Ema(const Ema&) = delete;
  Ema& operator=(const Ema&) = delete;

  /// Adds the current weights to the averages. 16-bit weights are widened one by one. Throws ConfigError within a
  /// Scope. If memory runs out, nothing has changed.
  void update();

  /// How often update() has run.
  int64_t updates() const { return updates_; }
  /// The averages in the order of the parameters, without repeats. Within a Scope the FP32 and FP64 averages hold the
  /// trained weights.
  const std::vector<at::Tensor>& averages() const { return averages_; }

  /// The averages (by reference) and the number of updates. state_dict() and load_state_dict() throw ConfigError within
  /// a Scope. Loading copies in place, and throws CorruptFile, and has changed nothing, if number, shapes or types
  /// differ.
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

  /// While a Scope lives the parameters hold the averages, rounded to their own type. At the end the parameters get
  /// back their former values, to the bit, whatever happened in between. FP32 and FP64 values are exchanged, with a
  /// scratch tensor as large as the largest parameter; 16-bit weights are copied.
  class [[nodiscard]] Scope {
   public:
    /// Throws ConfigError within another Scope of the same Ema. Allocates before changing anything.
    explicit Scope(Ema& ema);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    void exchange();

    Ema& ema_;
    std::vector<at::Tensor> kept_;  // the 16-bit weights; scratch for the others
  };

 private:
  std::vector<at::Tensor> averages_of(bool low) const;
  void refuse_in_scope(const char* what) const;

  EmaOptions options_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> averages_;
  int64_t updates_ = 0;
  bool in_scope_ = false;
};

}  // namespace snug
