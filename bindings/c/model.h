#pragma once
// The handle of a model.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "snug/c.h"
#include "snug/exported/exported_module.h"

struct snug_model {
  explicit snug_model(const char* file);

  std::shared_ptr<snug::ExportedModule> module;
  std::map<std::string, at::Tensor> tensors;  ///< parameters and buffers, on their own memory
  std::vector<std::string> names;             ///< of `tensors`, in their order
  c10::Device device{c10::kCPU};
};
