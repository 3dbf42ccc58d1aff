#include "python/src/python_model.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/ScopeExit.h>
#include <torch/nn/cloneable.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "snug/state.h"
#include "src/memory/limit_paused.h"

namespace torch::nn {

// A module lets nobody remove its buffers but what clones modules.
template <>
class Cloneable<snug::python::PythonModule> {
 public:
  static void clear(Module& module) { module.buffers_.clear(); }
};

}  // namespace torch::nn

namespace snug::python {
namespace {

namespace py = pybind11;

struct PythonOptions : torch::optim::OptimizerCloneableOptions<PythonOptions> {};

std::vector<torch::optim::OptimizerParamGroup> groups_of(const py::object& optimizer) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const py::handle group : optimizer.attr("param_groups")) {
    groups.emplace_back(group["params"].cast<std::vector<at::Tensor>>());
  }
  return groups;
}

// The module of names that begin with `path`, "a.b.", made where it is not there yet.
torch::nn::Module& child_at(torch::nn::Module& root, const std::string& path) {
  torch::nn::Module* module = &root;
  for (size_t begin = 0; begin < path.size();) {
    const size_t end = path.find('.', begin);
    const std::string name = path.substr(begin, end - begin);
    auto children = module->named_children();
    const auto* found = children.find(name);
    module =
        found != nullptr ? found->get() : module->register_module(name, std::make_shared<torch::nn::Module>()).get();
    begin = end + 1;
  }
  return *module;
}

template <class Register>
void add_tensors(torch::nn::Module& root, const py::iterable& named, const Register& add) {
  for (const py::handle entry : named) {
    const auto [name, tensor] = entry.cast<std::pair<std::string, at::Tensor>>();
    const size_t dot = name.rfind('.') + 1;  // 0 where there is none
    add(child_at(root, name.substr(0, dot)), name.substr(dot), tensor);
  }
}

}  // namespace

PythonModule::PythonModule(const py::object& model) : model_(model) {
  add_tensors(*this, model.attr("named_parameters")(),
              [](torch::nn::Module& module, const std::string& name, const at::Tensor& tensor) {
                module.register_parameter(name, tensor, tensor.requires_grad());
              });
  update();
}

void PythonModule::update() {
  forget_buffers();
  add_tensors(*this, model_->attr("named_buffers")(),
              [](torch::nn::Module& module, const std::string& name, const at::Tensor& tensor) {
                module.register_buffer(name, tensor);
              });
  train(model_->attr("training").cast<bool>());
}

void PythonModule::forget_buffers() {
  using Buffers = torch::nn::Cloneable<PythonModule>;
  Buffers::clear(*this);
  for (const auto& module : modules(/*include_self=*/false)) {
    Buffers::clear(*module);
  }
}

PythonOptimizer::PythonOptimizer(const py::object& optimizer, Bytes limit)
    : Optimizer(groups_of(optimizer), std::make_unique<PythonOptions>()),
      optimizer_(optimizer),
      first_step_(py::module_::import("snug._first_step").attr("FirstStep")(optimizer)),
      limit_(limit) {}

at::Tensor PythonOptimizer::step(LossClosure closure) {
  const at::Tensor loss = closure ? closure() : at::Tensor();
  std::optional<detail::LimitPaused> no_limit;
  if (!limit_.is_unlimited()) {
    const c10::Device device = param_groups().front().params().front().device();
    const int64_t state =
        state_bytes_to_come_of([](const at::Tensor& parameter) { return parameter.grad().defined(); });
    const Bytes with_state = live_bytes(device) + Bytes(state);
    if (state > 0 && with_state > limit_) {
      C10_THROW_ERROR(OutOfMemoryError,
                      "the optimizer's state would make " + with_state.str() + " of live tensor memory");
    }
    no_limit.emplace(device, limit_);
  }
  with_lock([&] { optimizer_->attr("step")(); });
  return loss;
}

int64_t PythonOptimizer::state_bytes_to_come_of(const std::function<bool(const at::Tensor&)>& gets_gradient) const {
  const auto restore = c10::make_scope_exit([state = RngState::capture()] { state.restore(); });
  return with_lock([&] {
    py::list parameters;
    for (const auto& group : param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        if (gets_gradient(parameter)) {
          parameters.append(py::cast(parameter));
        }
      }
    }
    return first_step_->attr("state_bytes")(parameters).cast<int64_t>();
  });
}

// Parameter by parameter on a CPU, where Python's optimizers make up to three tensors of its size; all at once
// elsewhere.
int64_t PythonOptimizer::workspace_bytes() const {
  int64_t largest = 0;
  int64_t all = 0;
  for (const auto& group : param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto bytes = static_cast<int64_t>(parameter.nbytes());
      largest = std::max(largest, bytes);
      all += parameter.is_cpu() ? 0 : bytes;
    }
  }
  return std::max(3 * largest, 2 * all);
}

std::vector<at::Tensor> PythonOptimizer::state_tensors() const {
  return with_lock([&] {
    std::vector<at::Tensor> result;
    for (const py::handle of_one : optimizer_->attr("state").attr("values")()) {
      for (const py::handle value : of_one.attr("values")()) {
        if (THPVariable_Check(value.ptr())) {
          result.push_back(value.cast<at::Tensor>());
        }
      }
    }
    return result;
  });
}

}  // namespace snug::python
