#pragma once
// Muon: momentum, orthogonalised, for the matrices of a model, and AdamW for the model's other parameters, in the same
// optimizer.
//
//   snug::Muon optimizer(snug::Muon::groups(*model, {.lr = 0.02}, {.lr = 3e-4}));

#include <array>
#include <functional>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "snug/adamw.h"
#include "snug/fused_optimizer.h"

namespace snug {

struct MuonOptions {
  double lr = 1e-3;
  double weight_decay = 0.1;  ///< decoupled from the gradient
  double momentum = 0.95;
  bool nesterov = true;
  std::array<double, 3> ns_coefficients = {3.4445, -4.7750, 2.0315};  ///< of the Newton-Schulz iteration
  double eps = 1e-7;                                                  ///< least norm that a matrix is divided by
  int64_t ns_steps = 5;                                               ///< 0 to 99
  /// How the learning rate follows the shape [rows, columns] of a matrix.
  /// - false: times sqrt(max(1, rows / columns)).
  /// - true: times 0.2 sqrt(max(rows, columns)), so that AdamW's rates fit: Liu et al. 2025, arXiv:2502.16982.
  bool match_rms_adamw = false;
};

/// The options of a group of matrices.
struct MuonGroup : torch::optim::OptimizerCloneableOptions<MuonGroup> {
  MuonGroup() = default;
  explicit MuonGroup(MuonOptions given) : options(given) {}
  double get_lr() const override { return options.lr; }
  void set_lr(double lr) override { options.lr = lr; }

  MuonOptions options;
};

/// Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks", kellerjordan.github.io/posts/muon,
/// computed as in torch.optim.Muon, with the same bits on a CPU. A few steps of Newton and Schulz, in BF16, bring the
/// momentum of a matrix near the nearest matrix with orthogonal rows or columns. The result is the update. State per
/// matrix: momentum_buffer, 4 bytes an element instead of AdamW's 8. A group that holds torch::optim::AdamWOptions is
/// updated, and saved, as by AdamW.
/// Beside the state, an update takes workspace for the largest matrix of each group, see workspace_bytes(), and the
/// memory that LibTorch's products of matrices allocate by themselves. Each shape is tried before anything is written.
/// With a GradScaler, a step waits for the device. Muon's state does not go to a file.
class Muon : public FusedOptimizer {
 public:
  /// Throws ConfigError, naming the parameter or option, for an empty list, parameters in a group with Muon's options
  /// that are not matrices (of two dimensions) of floating point, or options out of range.
  explicit Muon(std::vector<at::Tensor> matrices, MuonOptions options = {});
  explicit Muon(const std::vector<torch::optim::OptimizerParamGroup>& groups, MuonOptions options = {});

  /// Two groups for the constructor. Muon gets the trained matrices of a module. AdamW gets the module's other trained
  /// parameters, the weights of torch::nn::Embedding, and the parameters for which `by_adamw(name, parameter)` is true.
  /// The output layer belongs to AdamW, too: let `by_adamw` return true for the output layer. Throws ConfigError if no
  /// matrix is left.
  static std::vector<torch::optim::OptimizerParamGroup> groups(
      const torch::nn::Module& module, MuonOptions muon = {}, AdamWOptions adamw = {},
      const std::function<bool(const std::string& name, const at::Tensor& parameter)>& by_adamw = {});

  int64_t shard_multiple() const override { return 0; }
  int64_t workspace_bytes() const override;

 protected:
  void make_state(ParameterState& state, const at::Tensor& parameter,
                  const torch::optim::OptimizerOptions& options) const override;
  void check_in_group(const at::Tensor& parameter, const torch::optim::OptimizerOptions& options) const override;
  std::function<void()> prepare(const Work& work) const override;
  bool state_may_leave() const override { return false; }
};

}  // namespace snug
