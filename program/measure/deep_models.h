#pragma once
// Deep networks as chains of layers, and techniques for running a chain in fewer bytes.
//
//   const DeepModel model = deep_gpt({.layers = 12}, /*batch=*/4);
//   const at::Tensor input = model.input(model.batch);
//   for (const Technique& technique : techniques_for(model)) {
//     forward_under(technique, model, input).backward();
//   }

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "program/models/gpt.h"
#include "snug/checkpoint.h"

namespace torch::nn {
class Module;
}

namespace snug::measure {

using Layer = std::function<at::Tensor(at::Tensor)>;
using Layers = std::vector<Layer>;

struct DeepModel {
  std::string name;  ///< for names of files
  std::string what;  ///< for people
  std::shared_ptr<torch::nn::Module> module;
  Layers layers;
  /// The layers as reversible blocks, with the same parameters: another network. Empty: the model has no reversible
  /// form.
  Layer reversible = {};
  std::string reversible_part = {};  ///< the reversible layers; empty: all layers
  int64_t batch = 0;
  std::function<at::Tensor(int64_t items)> input = {};
  /// The mean loss over an input; `run` runs the layers.
  std::function<at::Tensor(const at::Tensor& input, const Layer& run)> loss = {};

  std::vector<at::Tensor> parameters() const;
};

DeepModel deep_mlp(int64_t layers, int64_t width, int64_t batch);
DeepModel deep_gpt(const GptOptions& options, int64_t batch);
/// The same with heads of 32 numbers each.
DeepModel deep_gpt(int64_t layers, int64_t width, int64_t context, int64_t batch);
DeepModel deep_resnet(int64_t depth, int64_t batch);

/// The model and the model's inputs on `device`.
DeepModel on_device(DeepModel model, c10::Device device);

/// A technique for running a chain. `make` returns the runner.
struct Technique {
  std::string name;   ///< of the technique's family
  std::string label;  ///< of this member of the family; empty: the family has one member
  std::function<at::Tensor(const DeepModel&, at::Tensor)> run;
  bool offloads = false;
  bool is_same_network = true;

  std::string title() const { return label.empty() ? name : name + ", " + label; }
};

/// Runs the layers one after the other, and keeps everything.
at::Tensor in_order(const Layers& layers, at::Tensor x);

/// Runs the layers one after the other, each as a checkpointed region.
at::Tensor each_checkpointed(const Layers& layers, at::Tensor x, const CheckpointOptions& options = {});

/// The plain technique first; without techniques that plan (see Rematerialize).
std::vector<Technique> techniques_for(const DeepModel& model);

/// The technique of techniques_for(model) in which every layer is a segment.
const Technique& every_layer(const std::vector<Technique>& techniques);

/// Runs one forward pass under the technique and returns the loss.
at::Tensor forward_under(const Technique& technique, const DeepModel& model, const at::Tensor& input);

}  // namespace snug::measure
