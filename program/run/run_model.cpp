#include "program/run/run_model.h"

#include <algorithm>
#include <limits>
#include <utility>

#include <ATen/ops/cross_entropy_loss.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <torch/utils.h>

#include "program/models/gpt.h"
#include "program/run/device.h"
#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/precision.h"
#include "src/core/file_system.h"
#include "src/io/checksum.h"

namespace snug {
namespace {

constexpr int64_t kOpen = std::numeric_limits<int64_t>::max();

RunModel gpt_model(const TrainConfig& config) {
  Gpt model(gpt_configuration(config.model));
  const bool recompute = config.checkpoint() == Checkpointing::Blocks;
  model->set_block_runner([recompute](const auto& block, at::Tensor x) {
    const PrecisionScope scope("blocks");
    return recompute ? checkpoint({.label = "block"}, block, std::move(x)) : block(std::move(x));
  });
  const std::vector<ExportedModule::Input::Size> sizes{{0, kOpen}, {model->options.context, model->options.context}};
  return {.module = model.ptr(),
          .inputs = {{"tokens", at::kLong, sizes}, {"target", at::kLong, sizes}},
          .loss_of = [model](const Batch& batch) mutable {
            const at::Tensor logits = model->forward(batch[0]).to(at::kFloat);
            const at::Tensor sum = at::cross_entropy_loss(logits.reshape({-1, logits.size(-1)}), batch[1].reshape({-1}),
                                                          {}, at::Reduction::Sum);
            return Loss::sum(sum, batch[1].numel());
          }};
}

void check_exported(const ExportedModule& model, const TrainConfig& config) {
  if (config.checkpoint() == Checkpointing::Blocks) {
    throw ConfigError(
        "model: checkpoint blocks is for a GPT, whose blocks are known; give --memory, which finds for an exported "
        "model what to compute again");
  }
  for (const ExportedModule::Input& input : model.inputs()) {
    if (!input.dtype || input.sizes.empty()) {
      throw ConfigError(fmt::format(
          "model: {}: input '{}' is {}, so it has no dimension of samples; make it a constant of the Python model",
          config.model, input.name, input.dtype ? "a scalar" : "a number"));
    }
  }
}

RunModel exported_model(const TrainConfig& config) {
  if (!detail::FileSystem::real().exists(config.model)) {
    throw ConfigError(fmt::format("model: there is no file {}; check the path", config.model));
  }
  const auto model = load_exported(config.model);
  check_exported(*model, config);
  const bool counts_tokens = takes_tokens(model->inputs());
  const auto loss_of = [model, counts_tokens](const Batch& batch) {
    return Loss::mean(model->loss(batch.tensors()), counts_tokens ? batch[0].numel() : batch.size());
  };
  const auto buffers = [model] {
    auto tensors = model->state_dict();
    for (const auto& parameter : model->named_parameters()) {
      tensors.erase(parameter.key());
    }
    return tensors;
  };
  return {.module = model,
          .inputs = model->inputs(),
          .loss_of = loss_of,
          .buffers = buffers,
          .checksum = detail::checksum_of_file(config.model).crc32};
}

}  // namespace

bool is_exported(std::string_view name) { return name.ends_with(".pt2"); }

std::string_view item_name(std::string_view model) { return is_exported(model) ? "items" : "tokens"; }

RunModel run_model(const TrainConfig& config, c10::Device device, bool has_weights_on_host) {
  torch::manual_seed(static_cast<uint64_t>(config.seed));
  RunModel model = is_exported(config.model) ? exported_model(config) : gpt_model(config);
  if (config.weights == Weights::Low) {
    model.module->to(compute_dtype(config.precision));
  }
  has_weights_on_host ? move_with_weights_on_host(*model.module, device) : move_to(*model.module, device);
  return model;
}

RunModel run_model_or_on_host(const TrainConfig& config, c10::Device device) {
  try {
    return run_model(config, device);
  } catch (const c10::Error& error) {
    if (device.is_cpu() || !is_out_of_memory(error)) {
      throw;
    }
  }
  return run_model(config, device, /*has_weights_on_host=*/true);
}

int64_t fixed_samples(const std::vector<ExportedModule::Input>& inputs) {
  const auto fixed = std::find_if(inputs.begin(), inputs.end(), [](const ExportedModule::Input& input) {
    return input.sizes.front().least == input.sizes.front().most;
  });
  return fixed == inputs.end() ? 0 : fixed->sizes.front().most;
}

bool takes_tokens(const std::vector<ExportedModule::Input>& inputs) {
  return (inputs.size() == 1 || inputs.size() == 2) &&
         std::all_of(inputs.begin(), inputs.end(), [&](const ExportedModule::Input& input) {
           return input.dtype == at::kLong && input.sizes.size() == 2 &&
                  input.sizes[1].most == inputs.front().sizes[1].most;
         });
}

std::vector<int64_t> sizes_of(const ExportedModule::Input& input, int64_t samples) {
  std::vector<int64_t> sizes{samples};
  for (size_t dimension = 1; dimension < input.sizes.size(); ++dimension) {
    sizes.push_back(input.sizes[dimension].most);
    if (sizes.back() == kOpen) {
      throw ConfigError(fmt::format(
          "model: input '{}' may have any size in dimension {}, so none can be chosen; give one at export, such as "
          "torch.export.Dim(\"size\", max=128), or data of .safetensors",
          input.name, dimension));
    }
  }
  return sizes;
}

}  // namespace snug
