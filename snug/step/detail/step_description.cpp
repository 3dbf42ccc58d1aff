#include "snug/step/detail/step_description.h"

#include <typeinfo>

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Type.h>
#include <nlohmann/json.hpp>
#include <torch/version.h>

#include "snug/distributed/data_parallel.h"
#include "snug/distributed/process_group.h"

namespace snug::detail {
namespace {

nlohmann::json described(const std::string& name, const at::Tensor& tensor) {
  return {name, c10::DeviceTypeName(tensor.device().type()), c10::toString(tensor.scalar_type()), tensor.sizes().vec(),
          tensor.requires_grad()};
}

}  // namespace

std::string describe_stepper(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer,
                             const StepperOptions& options, Precision precision, Bytes budget) {
  nlohmann::json tensors = nlohmann::json::array();
  for (const auto& parameter : model.named_parameters()) {
    tensors.push_back(described(parameter.key(), parameter.value()));
  }
  for (const auto& buffer : model.named_buffers()) {
    tensors.push_back(described(buffer.key(), buffer.value()));
  }
  const DataParallel* parallel = options.data_parallel;
  return nlohmann::json{{"snug", SNUG_VERSION},
                        {"torch", TORCH_VERSION},
                        {"cpu", at::get_cpu_capability()},
                        {"threads", at::get_num_threads()},
                        {"rank", parallel != nullptr ? parallel->group().rank() : 0},
                        {"ranks", parallel != nullptr ? parallel->group().size() : 1},
                        {"budget", budget.count()},
                        {"offload", options.offload ? options.offload->string() : ""},
                        {"precision", to_string(precision)},
                        {"low_weights", options.weights == Weights::Low},
                        {"fp32_reductions", options.fp32_reductions},
                        {"micro_batch", options.micro_batch},
                        {"carried", !options.carried.empty()},
                        {"split_batch_norm", options.split_batch_norm},
                        {"optimizer", c10::demangle(typeid(optimizer).name())},
                        {"tensors", tensors}}
      .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);  // names need not be UTF-8
}

}  // namespace snug::detail
