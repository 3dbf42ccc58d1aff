#include "snug/run/detail/run_inputs.h"

#include <array>
#include <string_view>

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/Tensor.h>
#include <fmt/format.h>
#include <unistd.h>

#include "snug/core/error.h"
#include "snug/io/detail/checksum.h"
#include "snug/run/device.h"

namespace snug::detail {

c10::Device device_of_rank(const std::string& name, int local_rank) {
  const c10::Device device = parse_device("train", name);
  const bool is_open = !device.is_cpu() && !device.has_index() && local_rank < at::accelerator::deviceCount();
  return is_open ? c10::Device(device.type(), static_cast<c10::DeviceIndex>(local_rank)) : device;
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
