#pragma once
// A TorchScript module as a torch::nn::Module that trains in C++: Stepper, plans, budgets, optimizers and snapshots
// take it as they take any other. For new models torch.export is the better way: see exported_module.h.
//
//   auto model = snug::wrap_script(torch::jit::load("model.pt"));
//   snug::AdamW optimizer(model->parameters(), {.lr = 1e-3});
//   at::Tensor scores = model->forward({x});

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace torch::jit {
struct Module;
}

namespace snug {

/// A module of TorchScript. Its parameters and buffers are the script's own tensors.
class ScriptModule : public torch::nn::Module {
 public:
  /// As wrap_script.
  explicit ScriptModule(const torch::jit::Module& script);
  ~ScriptModule() override;

  /// What TorchScript's forward() returns, which must be one tensor: else Error. Operators run one by one, as written:
  /// TorchScript's optimiser, which turns them into others after some calls, is off meanwhile. Exceptions of operators
  /// come as TorchScript's std::runtime_error, those for want of memory too, which Stepper and plans recognise. Throws
  /// Error if the code gave a buffer's name to a new tensor (self.steps = self.steps + 1), which the module would not
  /// save; write in place (self.steps += 1).
  at::Tensor forward(const std::vector<at::Tensor>& inputs);

  /// Also the script's own mode.
  void train(bool on = true) override;
  /// Casts floating-point tensors alone.
  void to(at::ScalarType dtype, bool non_blocking = false) override;
  void to(at::Device device, at::ScalarType dtype, bool non_blocking = false) override;
  using torch::nn::Module::to;

  /// Parameters and buffers, detached, under TorchScript's names, which are Python's; tied ones once, under the first.
  std::map<std::string, at::Tensor> state_dict() const;

 private:
  void check_buffers() const;

  std::unique_ptr<torch::jit::Module> script_;
  std::map<std::string, at::Tensor> tensors_;  // tied ones under each name
  std::map<std::string, at::Tensor> untied_;
};

/// Parameters and buffers are those of `script` itself, under its names, in its mode (train or eval).
std::shared_ptr<ScriptModule> wrap_script(const torch::jit::Module& script);

}  // namespace snug
