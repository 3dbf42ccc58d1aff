#pragma once
// Checks of the inputs of a run before the run starts.

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "program/run/config.h"
#include "snug/exported/exported_module.h"

namespace snug::detail {

/// The device with the given name, as by parse_device, which throws ConfigError for a missing device. An accelerator
/// without an index, such as "cuda", is this rank's device among the devices of the machine.
c10::Device device_of_rank(const std::string& name, int local_rank);

/// Throws ConfigError if a rank's share of a batch is larger than the memory of the machine, or cannot be cut into the
/// number of samples that the model's `inputs` are fixed to.
void check_batch(const TrainConfig& config, const std::vector<ExportedModule::Input>& inputs, int ranks);

/// Throws ConfigError if `samples` are fewer than the model's `inputs` are fixed to.
void check_held_out(int64_t samples, const std::vector<ExportedModule::Input>& inputs);

}  // namespace snug::detail
