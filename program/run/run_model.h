#pragma once
// RunModel: the model of a run and its loss: a GPT by its name, or a file of torch.export that returns its loss.
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
  std::vector<ExportedInput> inputs;  ///< the tensors of a batch
  /// Of the tensors of a batch on the model's device. Throws ConfigError for a loss that is no scalar.
  std::function<Loss(const Batch&)> loss_of;
  /// The tensors of the module that are no parameters and belong to a file of its weights.
  std::function<std::map<std::string, at::Tensor>()> buffers = [] { return std::map<std::string, at::Tensor>(); };
  int64_t checksum = 0;  ///< of the file
};

/// Whether `name` is a file of torch.export, and no configuration of a GPT.
bool is_exported(std::string_view name);

/// What StepRecord::items counts for such a model, in the plural: "tokens" of a GPT, else "items".
std::string_view item_name(std::string_view model);

/// The model that `config` names, on `device` and of its weights' type; a GPT's weights are random by config.seed.
/// Throws as gpt_configuration and load_exported do, and ConfigError for settings that the model cannot have.
RunModel run_model(const TrainConfig& config, c10::Device device);

/// The samples that a forward pass must have, where a model was exported for one number of them; 0: any number.
int64_t fixed_samples(const std::vector<ExportedInput>& inputs);

/// Whether the inputs are tokens, or tokens and the targets: integers of one shape [samples, time].
bool takes_tokens(const std::vector<ExportedInput>& inputs);

/// Sizes of an input of `samples` samples: of a dimension of several sizes, the largest. Throws ConfigError, where
/// there is none.
std::vector<int64_t> sizes_of(const ExportedInput& input, int64_t samples);

}  // namespace snug
