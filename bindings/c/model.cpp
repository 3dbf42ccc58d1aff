#include "bindings/c/model.h"

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <fmt/format.h>

#include "bindings/c/arrays.h"
#include "bindings/c/errors.h"
#include "snug/memory.h"
#include "snug/safetensors.h"

struct snug_results {
  std::vector<at::Tensor> tensors;
};

namespace {

using snug::c::guarded;
using snug::c::required;

const char* name_at(const std::vector<std::string>& names, size_t index) {
  return index < names.size() ? names[index].c_str() : nullptr;
}

// Each tensor of a file under the name that it has in the model: tied weights may stand under any of theirs.
std::map<std::string, at::Tensor> read_weights(const std::string& file, const snug_model& model) {
  std::map<std::string, at::Tensor> result;
  for (const auto& [name_in_file, read] : snug::load_safetensors(file)) {
    const auto alias = model.module->aliases().find(name_in_file);
    const std::string& name = alias == model.module->aliases().end() ? name_in_file : alias->second;
    const auto found = model.tensors.find(name);
    if (found == model.tensors.end()) {
      throw snug::ConfigError(fmt::format("{} has a tensor '{}', which the model lacks", file, name_in_file));
    }
    if (found->second.sizes() != read.sizes() || found->second.scalar_type() != read.scalar_type()) {
      throw snug::ConfigError(
          fmt::format("{}: '{}' has another type or other sizes than the model's", file, name_in_file));
    }
    result[name] = read;
  }
  for (const auto& [name, tensor] : model.tensors) {
    if (!result.contains(name)) {
      throw snug::ConfigError(fmt::format("{} has no tensor '{}', which the model has", file, name));
    }
  }
  return result;
}

c10::Device device_of(const std::string& name) {
  try {
    return c10::Device(name);
  } catch (const c10::Error&) {
    throw snug::ConfigError(fmt::format("snug_model: '{}' is no device; give cpu, cuda, cuda:1 and the like", name));
  }
}

// Tensors of steppers, and arrays on the CPU's memory, would be of the model as it was.
template <class Move>
snug_status move_to(snug_model* model, const char* device, const Move& move) {
  return guarded([&] {
    snug_model& of = required(model, "snug_model: model");
    const c10::Device to = device_of(&required(device, "snug_model: device"));
    if (of.module.use_count() > 1) {
      throw snug::ConfigError("snug_model: the model has a stepper; move the model before a stepper is made");
    }
    move(*of.module, to);
    of.tensors = of.module->state_dict();
    of.device = to;
  });
}

}  // namespace

snug_model::snug_model(const char* file) : module(snug::load_exported(file)), tensors(module->state_dict()) {
  for (const auto& [name, tensor] : tensors) {
    names.push_back(name);
  }
}

snug_status snug_model_load(const char* file, snug_model** model) {
  return guarded([&] {
    snug_model*& result = required(model, "snug_model_load: model");
    result = new snug_model(&required(file, "snug_model_load: file"));
  });
}

void snug_model_free(snug_model* model) { delete model; }

snug_status snug_model_to(snug_model* model, const char* device) {
  return move_to(model, device, [](snug::ExportedModule& module, c10::Device to) { module.to(to); });
}

snug_status snug_model_move_with_weights_on_host(snug_model* model, const char* device) {
  return move_to(model, device, &snug::move_with_weights_on_host);
}

size_t snug_model_input_count(const snug_model* model) { return model ? model->module->input_names().size() : 0; }

size_t snug_model_output_count(const snug_model* model) { return model ? model->module->output_names().size() : 0; }

const char* snug_model_input_name(const snug_model* model, size_t index) {
  return model ? name_at(model->module->input_names(), index) : nullptr;
}

const char* snug_model_output_name(const snug_model* model, size_t index) {
  return model ? name_at(model->module->output_names(), index) : nullptr;
}

size_t snug_model_tensor_count(const snug_model* model) { return model ? model->names.size() : 0; }

const char* snug_model_tensor_name(const snug_model* model, size_t index) {
  return model ? name_at(model->names, index) : nullptr;
}

snug_status snug_model_tensor(const snug_model* model, const char* name, snug_array* tensor) {
  return guarded([&] {
    const snug_model& of = required(model, "snug_model_tensor: model");
    const auto found = of.tensors.find(&required(name, "snug_model_tensor: name"));
    if (found == of.tensors.end()) {
      throw snug::ConfigError(std::string("snug_model_tensor: the model has no tensor '") + name + "'");
    }
    required(tensor, "snug_model_tensor: tensor") = snug::c::array_of(found->second);
  });
}

snug_status snug_model_train(snug_model* model, int on) {
  return guarded([&] { required(model, "snug_model_train: model").module->train(on != 0); });
}

snug_status snug_model_save_weights(const snug_model* model, const char* file) {
  return guarded([&] {
    snug::save_safetensors(&required(file, "snug_model_save_weights: file"),
                           required(model, "snug_model_save_weights: model").tensors, {{"format", "pt"}});
  });
}

snug_status snug_model_load_weights(snug_model* model, const char* file) {
  return guarded([&] {
    snug_model& of = required(model, "snug_model_load_weights: model");
    const auto read = read_weights(&required(file, "snug_model_load_weights: file"), of);
    const at::NoGradGuard no_grad;
    for (auto& [name, tensor] : of.tensors) {
      tensor.copy_(read.at(name));
    }
  });
}

snug_status snug_model_forward(snug_model* model, const snug_array* inputs, size_t count, snug_results** results) {
  return guarded([&] {
    snug_model& of = required(model, "snug_model_forward: model");
    snug_results*& result = required(results, "snug_model_forward: results");
    const at::NoGradGuard no_grad;
    auto made = std::make_unique<snug_results>();
    std::vector<at::Tensor> tensors = snug::c::tensors_of(inputs, count);
    for (at::Tensor& tensor : tensors) {
      tensor = tensor.to(of.device);
    }
    for (const at::Tensor& output : of.module->run(tensors)) {
      made->tensors.push_back(output.cpu().clone(at::MemoryFormat::Contiguous));  // it may be an input, or a parameter
    }
    result = made.release();
  });
}

size_t snug_results_count(const snug_results* results) { return results ? results->tensors.size() : 0; }

snug_status snug_results_get(const snug_results* results, size_t index, snug_array* array) {
  return guarded([&] {
    const auto& tensors = required(results, "snug_results_get: results").tensors;
    if (index >= tensors.size()) {
      throw snug::ConfigError("snug_results_get: there is no result " + std::to_string(index));
    }
    required(array, "snug_results_get: array") = snug::c::array_of(tensors[index]);
  });
}

void snug_results_free(snug_results* results) { delete results; }
