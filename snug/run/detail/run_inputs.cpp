#include "snug/run/detail/run_inputs.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <torch/cuda.h>
#include <unistd.h>

#include "snug/core/error.h"
#include "snug/io/detail/checksum.h"

namespace snug::detail {

c10::Device parse_device(const std::string& name, int local_rank) {
  const auto parsed = [&]() -> std::optional<c10::Device> {
    try {
      return c10::Device(name);
    } catch (const c10::Error&) {
      return std::nullopt;
    }
  }();
  // An index that is too large for c10 comes back as another one.
  if (!parsed || parsed->str() != name || !(parsed->is_cpu() || parsed->is_cuda())) {
    throw ConfigError(fmt::format("train: device '{}' is unknown; give cpu, cuda or cuda:1", name));
  }
  const int64_t there = parsed->is_cpu() ? 1 : static_cast<int64_t>(torch::cuda::device_count());
  if (std::max<int64_t>(0, parsed->index()) >= there) {
    throw ConfigError(fmt::format("train: device '{}' is not there: LibTorch finds {} of its kind; give {}", name,
                                  there, there > 0 ? "a smaller index" : "cpu"));
  }
  return parsed->is_cuda() && !parsed->has_index() && local_rank < there
             ? c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(local_rank))
             : *parsed;
}

c10::Device make_current(c10::Device device) {
  if (device.has_index() && !device.is_cpu()) {
    at::accelerator::setDeviceIndex(device.index());
  }
  return device;
}

int64_t checksum(const TextCorpus& corpus) {
  const auto text = [&](Split split) {
    const at::Tensor& bytes = corpus.bytes(split);
    return std::string_view(static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel()));
  };
  return checksum_of(std::array{text(Split::Train), text(Split::Validation)}).crc32;
}

void check_batch_fits(int64_t batch, int64_t context, int ranks) {
  const double bytes = 2.0 * sizeof(int64_t) * static_cast<double>(context) * static_cast<double>(batch) / ranks;
  const double there = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  if (bytes > there) {
    throw ConfigError(
        fmt::format("train: batch is {}: the bytes of so many sequences and of what follows each take {:.3g} GiB, and "
                    "this machine has {:.3g} GiB; give a smaller batch",
                    batch, bytes / (1 << 30), there / (1 << 30)));
  }
}

}  // namespace snug::detail
