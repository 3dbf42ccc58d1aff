#pragma once
// Precision: the floating-point type of the forward pass, and a choice of the type by measurement.
//
//   const snug::Precision p = snug::choose_precision(device);         // 16 bits only where they are faster
//
// PrecisionScope: names a region of forward, so that dynamic precision can move the region to FP32 when 16 bits
// overflow or underflow in the region.
//
//   Tensor forward(Tensor x) {
//     snug::PrecisionScope scope("blocks.3");     // parameters blocks.3.*
//     return block->forward(x);
//   }
//
// Gradient statistics: the sizes of the gradients of each parameter, as a histogram of their exponents, next to the
// shares that are lost at both ends of a 16-bit type. The statistics show why the loss is scaled. Take statistics every
// N steps, between backward and the next zero_grad.
//
//   scaler.unscale_(optimizer);
//   for (const auto& s : snug::gradient_statistics(model->named_parameters().pairs())) {
//     log(s.name, s.zeros, s.exponents);
//   }
//
// MasterWeights: FP32 copies of FP16 or BF16 parameters, for any optimizer to update. In the weight itself, a step
// smaller than half of the weight's last place (1 part in 256 for BF16) is rounded away; in the master the step counts.
//
//   model->to(torch::kBFloat16);
//   snug::MasterWeights masters(model->parameters());
//   torch::optim::SGD optimizer(masters.parameters(), 0.1);
//   loss.backward();
//   masters.gather_gradients();    // after each micro-batch: sums them in FP32
//   optimizer.step();
//   masters.scatter();
//   optimizer.zero_grad();

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace snug {

enum class Precision {
  Float32,
  BFloat16,  ///< autocast to BF16; FP32 weights
  Float16,   ///< autocast to FP16 with loss scaling; FP32 weights
  Auto,      ///< measured once by choose_precision; never Float16 on a CPU
};

/// "float32", "bfloat16", "float16", "auto".
std::string_view to_string(Precision);
/// Throws ConfigError and lists the names.
Precision precision_from_string(std::string_view name);
/// The type to autocast to; Float32 gives kFloat. Throws ConfigError for Auto, which is a question, not an answer.
c10::ScalarType compute_dtype(Precision);

/// The fastest precision on a device, by a measurement that is made once per device and process:
/// - BFloat16 if BF16 products are at least 1.2 times as fast as FP32 products, because casts cost time too. BFloat16
///   comes first, because BFloat16 needs no loss scaling;
/// - else Float16 if FP16 products are at least 1.2 times as fast, on devices other than a CPU: GPUs before Ampere have
///   fast FP16, but hardly any BF16;
/// - else Float32.
/// The measurement takes less than 100 ms, beside the time that libraries need to start. Without a measurement, the
/// first training step needs the same time to start libraries.
Precision choose_precision(c10::Device device);

/// Has an effect only inside a step of a Stepper with a precision guard, and only if the guard has moved the region.
/// Autocast then casts to FP32 instead of to 16 bits, inputs that arrive in 16 bits included. Scopes nest; a scope
/// inside a moved scope moves with the outer scope.
class [[nodiscard]] PrecisionScope final {
 public:
  /// `name`: the beginning of the names of the parameters used inside, up to a dot.
  explicit PrecisionScope(std::string name);
  ~PrecisionScope();
  PrecisionScope(const PrecisionScope&) = delete;
  PrecisionScope& operator=(const PrecisionScope&) = delete;

 private:
  class Full;
  std::unique_ptr<Full> full_;
};

struct GradientStatistics {
  static constexpr int kLowest = -40;  ///< exponents below are counted with kLowest
  static constexpr int kHighest = 20;  ///< exponents above are counted with kHighest

  std::string name;
  int64_t elements = 0;
  int64_t zeros = 0;       ///< exactly 0: dead units, unused rows, or underflow
  int64_t non_finite = 0;  ///< infinite or NaN: overflow
  /// The number of the other elements with |g| in [2^e, 2^(e+1)), for e from kLowest to kHighest.
  std::array<int64_t, kHighest - kLowest + 1> exponents{};
  /// Among the weights whose gradient is not 0, the share that a step did not change in 16 bits, because
  /// the change is less than half the distance between neighbouring 16-bit values. FP32 weights, masters or stochastic
  /// rounding avoid this loss. Empty: not measured.
  std::optional<double> lost_updates;
};

/// Statistics of the gradients of named parameters; parameters without a gradient are left out. Waits for the device
/// once. One pass over each gradient, and an FP32 copy of one at a time.
std::vector<GradientStatistics> gradient_statistics(
    const std::vector<std::pair<std::string, at::Tensor>>& named_parameters);

/// Micikevicius et al. 2018, arXiv:1710.03740, section 3.1. Parameters that are FP32 or FP64 already are their own
/// masters.
class MasterWeights {
 public:
  /// `low`: leaf tensors of a model; a tensor that is given twice counts once. Throws ConfigError, naming the index,
  /// for types that are not floating point. Throws ConfigError if `low` is empty.
  explicit MasterWeights(std::vector<at::Tensor> low);

  /// The masters, in the order of `low`: the parameters for the optimizer.
  const std::vector<at::Tensor>& parameters() const { return masters_; }
  /// The 16-bit (or own) parameters, in the same order.
  const std::vector<at::Tensor>& low() const { return low_; }

  /// Adds the gradients of the 16-bit parameters to the gradients of the masters, in FP32, and drops the 16-bit
  /// gradients. Sparse gradients stay sparse, coalesced.
  void gather_gradients();

  /// Rounds the masters into the 16-bit parameters. If the optimizer skipped the step, scatter() writes the same values
  /// again.
  void scatter();

 private:
  std::vector<at::Tensor> low_;
  std::vector<at::Tensor> masters_;
};

}  // namespace snug
