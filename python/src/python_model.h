#pragma once
// A model and an optimizer of Python's, as snug sees them: their tensors are the same, and the rest is asked of Python.

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "python/src/python_callable.h"
#include "snug/optimizer.h"

namespace snug::python {

/// The parameters and buffers of a torch.nn.Module under their names. It has no forward.
class PythonModule : public torch::nn::Module {
 public:
  /// With the lock.
  explicit PythonModule(const pybind11::object& model);
  /// Takes over whether the model trains, and its buffers. With the lock.
  void update();
  /// Until update(): what the model puts in their place frees them.
  void forget_buffers();

 private:
  Shared<pybind11::object> model_;
};

/// A torch.optim.Optimizer. step() calls Python's, and takes the lock for it. That writes parameter by parameter, so
/// what stopped it halfway would leave half of them updated. Therefore a MemoryLimit of `limit` bytes is off meanwhile;
/// where the state alone would go above it, c10::OutOfMemoryError is thrown before.
class PythonOptimizer final : public torch::optim::Optimizer, public MemoryAware {
 public:
  /// With the lock.
  explicit PythonOptimizer(const pybind11::object& optimizer, Bytes limit = Bytes::unlimited());

  at::Tensor step(LossClosure closure = nullptr) override;
  /// As a first step on small parameters shows it; 0 where that fails: then the second step plans again.
  int64_t state_bytes_to_come_of(const std::function<bool(const at::Tensor&)>& gets_gradient) const override;
  int64_t workspace_bytes() const override;
  std::vector<at::Tensor> state_tensors() const override;

 private:
  Shared<pybind11::object> optimizer_, first_step_;
  Bytes limit_;
};

}  // namespace snug::python
