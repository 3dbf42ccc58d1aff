#pragma once
// RunModel: the model of a run and the model's loss. The model is a GPT by name, or a file of torch.export that returns
// a loss.
//
//   const snug::RunModel model = snug::run_model({.model = "model.pt2"}, torch::kCPU);
//   model.loss_of(batch).value().backward();

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include "program/run/config.h"
#include "snug/accumulation.h"
#include "snug/exported/exported_module.h"

namespace snug {

struct RunModel {
  std::shared_ptr<torch::nn::Module> module;
  std::vector<ExportedModule::Input> inputs;  ///< the tensors of a batch
  /// The loss of the tensors of a batch on the model's device. Throws ConfigError for a loss that is not a scalar.
  std::function<Loss(const Batch&)> loss_of;
  /// The tensors of the module that are not parameters and belong to a file of the module's weights.
  std::function<std::map<std::string, at::Tensor>()> buffers = [] { return std::map<std::string, at::Tensor>(); };
  int64_t checksum = 0;  ///< of the model's file
};

/// Whether `name` is a file of torch.export, and not a configuration of a GPT.
bool is_exported(std::string_view name);

/// The noun for StepRecord::items with such a model, in the plural: "tokens" for a GPT, else "items".
std::string_view item_name(std::string_view model);

/// The model named by `config`, on `device` and with the type of config's weights. A GPT's weights are random by
/// config.seed. `has_weights_on_host`: see move_with_weights_on_host. Throws as gpt_configuration and load_exported do,
/// and ConfigError for settings that do not fit the model.
RunModel run_model(const TrainConfig& config, c10::Device device, bool has_weights_on_host = false);

/// The same. If a device other than the CPU has no room for the weights, the weights are on the host.
RunModel run_model_or_on_host(const TrainConfig& config, c10::Device device);

/// The number of samples in a forward pass, if a model was exported for one number of samples; 0: any number.
int64_t fixed_samples(const std::vector<ExportedModule::Input>& inputs);

/// Whether the inputs are tokens, or tokens and the targets: integers of one shape [samples, time].
bool takes_tokens(const std::vector<ExportedModule::Input>& inputs);

/// Sizes of an input of `samples` samples. A dimension with several possible sizes gets the largest size. Throws
/// ConfigError if a dimension has no largest size.
std::vector<int64_t> sizes_of(const ExportedModule::Input& input, int64_t samples);

}  // namespace snug
