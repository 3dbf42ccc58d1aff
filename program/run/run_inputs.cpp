#include "program/run/run_inputs.h"

#include <algorithm>
#include <cstdint>

#include <ATen/DeviceAccelerator.h>
#include <c10/core/ScalarType.h>
#include <fmt/format.h>
#include <unistd.h>

#include "program/run/device.h"
#include "program/run/run_model.h"
#include "snug/core.h"

namespace snug::detail {

c10::Device device_of_rank(const std::string& name, int local_rank) {
  const c10::Device device = parse_device("train", name);
  const bool is_open = !device.is_cpu() && !device.has_index() && local_rank < at::accelerator::deviceCount();
  return is_open ? c10::Device(device.type(), static_cast<c10::DeviceIndex>(local_rank)) : device;
}

namespace {

// The bytes of a sample's tensors; a dimension of open size counts as 1.
double sample_bytes(const std::vector<ExportedModule::Input>& inputs) {
  double bytes = 0;
  for (const ExportedModule::Input& input : inputs) {
    double elements = 1;
    for (size_t i = 1; i < input.sizes.size(); ++i) {
      elements *= static_cast<double>(std::max<int64_t>(input.sizes[i].least, 1));
    }
    bytes += elements * static_cast<double>(c10::elementSize(*input.dtype));
  }
  return bytes;
}

void check_batch_fits(int64_t batch, double bytes) {
  const double there = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  if (bytes > there) {
    throw ConfigError(
        fmt::format("train: batch is {}: the bytes of so many samples take {:.3g} GiB, and this machine has {:.3g} "
                    "GiB; give a smaller batch",
                    batch, bytes / (1 << 30), there / (1 << 30)));
  }
}

}  // namespace

void check_batch(const TrainConfig& config, const std::vector<ExportedModule::Input>& inputs, int ranks) {
  check_batch_fits(config.batch, sample_bytes(inputs) * static_cast<double>(config.batch) / ranks);
  const int64_t fixed = fixed_samples(inputs);
  if (fixed == 0) {
    return;
  }
  const int64_t together = config.micro_batch > 0 ? config.micro_batch * ranks : config.batch;
  if (together != fixed * ranks || config.batch % together != 0) {
    throw ConfigError(fmt::format(
        "train: {} was exported for {} samples at a time and no other number; give --batch {}, a multiple of "
        "it with --micro-batch {}, or export it with dynamic_shapes",
        config.model, fixed, fixed * ranks, fixed));
  }
}

void check_held_out(int64_t samples, const std::vector<ExportedModule::Input>& inputs) {
  if (const int64_t fixed = fixed_samples(inputs); samples < fixed) {
    throw ConfigError(fmt::format(
        "train: {} samples are held out, and the model was exported for {} at a time; give more data", samples, fixed));
  }
}

}  // namespace snug::detail
