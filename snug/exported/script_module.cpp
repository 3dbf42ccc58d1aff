#include "snug/exported/script_module.h"

#include <algorithm>
#include <optional>

#include <fmt/format.h>
#include <torch/csrc/jit/api/module.h>

#include "snug/core/detail/torchscript_as_it_is.h"
#include "snug/core/error.h"
#include "snug/exported/detail/weights.h"

namespace snug {

ScriptModule::ScriptModule(const torch::jit::Module& script)
    : torch::nn::Module("ScriptModule"), script_(std::make_unique<torch::jit::Module>(script)) {
  const auto add = [&](const std::string& name, const at::Tensor& tensor, bool is_parameter) {
    tensors_.emplace(name, tensor);
    const bool is_tied =
        std::any_of(untied_.begin(), untied_.end(), [&](const auto& other) { return other.second.is_same(tensor); });
    if (is_tied) {
      return;
    }
    untied_.emplace(name, tensor);
    torch::nn::Module& owner = detail::module_at(*this, name);
    const std::string last = name.substr(name.rfind('.') + 1);
    is_parameter ? owner.register_parameter(last, tensor, tensor.requires_grad()) : owner.register_buffer(last, tensor);
  };
  for (const auto& parameter : script_->named_parameters()) {
    add(parameter.name, parameter.value, true);
  }
  for (const auto& buffer : script_->named_buffers()) {
    add(buffer.name, buffer.value, false);
  }
  torch::nn::Module::train(script_->is_training());
}

ScriptModule::~ScriptModule() = default;

at::Tensor ScriptModule::forward(const std::vector<at::Tensor>& inputs) {
  const detail::TorchScriptAsItIs as_written;
  const c10::IValue result = script_->forward({inputs.begin(), inputs.end()});
  check_buffers();
  if (!result.isTensor()) {
    throw Error(fmt::format("ScriptModule.forward: the module returns {}, not a tensor; return one", result.tagKind()));
  }
  return result.toTensor();
}

void ScriptModule::check_buffers() const {
  for (const auto& buffer : script_->named_buffers()) {
    const auto registered = tensors_.find(buffer.name);
    if (registered == tensors_.end() || !registered->second.is_same(buffer.value)) {
      throw Error(
          fmt::format("ScriptModule: the buffer '{}' became another tensor, which would not be saved; in the Python "
                      "model, write it in place (self.x += 1)",
                      buffer.name));
    }
  }
}

void ScriptModule::train(bool on) {
  torch::nn::Module::train(on);
  script_->train(on);
}

void ScriptModule::to(at::ScalarType dtype, bool non_blocking) {
  detail::cast_floats(untied_, std::nullopt, dtype, non_blocking);
}

void ScriptModule::to(at::Device device, at::ScalarType dtype, bool non_blocking) {
  detail::cast_floats(untied_, device, dtype, non_blocking);
}

std::map<std::string, at::Tensor> ScriptModule::state_dict() const {
  std::map<std::string, at::Tensor> result;
  for (const auto& [name, tensor] : untied_) {
    result[name] = tensor.detach();
  }
  return result;
}

std::shared_ptr<ScriptModule> wrap_script(const torch::jit::Module& script) {
  return std::make_shared<ScriptModule>(script);
}

}  // namespace snug
