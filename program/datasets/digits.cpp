#include "program/datasets/digits.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <fstream>
#include <system_error>
#include <vector>

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "snug/core.h"

// IDX, the format of MNIST (yann.lecun.com/exdb/mnist): two zero bytes, 8 for bytes, the number of dimensions; each
// dimension in 4 bytes, the highest first; the numbers.

namespace snug {
namespace {

namespace fs = std::filesystem;

constexpr uint32_t kIdxOfBytes = 0x0800;
constexpr int64_t kDigits = 10;

[[noreturn]] void corrupt(const fs::path& path, const std::string& what) {
  throw CorruptFile(fmt::format("load_digits: {} {}", path.string(), what));
}

uint32_t read_number(std::ifstream& file, const fs::path& path) {
  std::array<char, 4> bytes{};
  if (!file.read(bytes.data(), bytes.size())) {
    corrupt(path, "ends within its header; was it cut short?");
  }
  uint32_t number = 0;
  for (const char byte : bytes) {
    number = number << 8 | static_cast<uint8_t>(byte);
  }
  return number;
}

// uint8, in the shape given by the file.
at::Tensor read_idx(const fs::path& path, uint32_t dimensions) {
  std::error_code reason;
  const auto size = static_cast<int64_t>(fs::file_size(path, reason));
  std::ifstream file(path, std::ios::binary);
  if (reason || !file) {
    throw ConfigError(
        fmt::format("load_digits: {} cannot be read{}; script/setup fetches the digits into build/data/digits",
                    path.string(), reason ? ": " + reason.message() : ""));
  }
  if (const uint32_t magic = read_number(file, path); magic != kIdxOfBytes + dimensions) {
    corrupt(path, fmt::format("begins with {:#010x}, not {:#010x}; it is no IDX file of bytes in {} dimensions", magic,
                              kIdxOfBytes + dimensions, dimensions));
  }
  std::vector<int64_t> sizes;
  int64_t header = 4, content = 1;
  bool overflow = false;
  for (uint32_t i = 0; i < dimensions; ++i) {
    sizes.push_back(read_number(file, path));
    overflow = overflow || __builtin_mul_overflow(content, sizes.back(), &content);
    header += 4;
  }
  if (overflow || content == 0 || content != size - header) {
    corrupt(path, fmt::format("is {} bytes long, which does not fit its header's [{}]; was it cut short?", size,
                              fmt::join(sizes, ", ")));
  }
  at::Tensor bytes = at::empty(sizes, at::TensorOptions(at::kCPU).dtype(at::kByte));
  if (!file.read(static_cast<char*>(bytes.mutable_data_ptr()), content)) {
    corrupt(path, "cannot be read to its end; did it change meanwhile?");
  }
  return bytes;
}

}  // namespace

Digits load_digits(const fs::path& folder) {
  const fs::path of_images = folder / "images-idx3-ubyte", of_labels = folder / "labels-idx1-ubyte";
  const at::Tensor images = read_idx(of_images, 3);
  const at::Tensor labels = read_idx(of_labels, 1);
  if (images.size(0) != labels.size(0)) {
    corrupt(of_labels, fmt::format("has {} labels for {} pictures; the two files do not belong together",
                                   labels.size(0), images.size(0)));
  }
  const auto* first = labels.const_data_ptr<uint8_t>();
  const auto* bad = std::find_if(first, first + labels.numel(), [](uint8_t label) { return label >= kDigits; });
  if (bad != first + labels.numel()) {
    corrupt(of_labels, fmt::format("says that picture {} shows {}, which is no digit", bad - first, *bad));
  }
  return {images.unsqueeze(1).to(at::kFloat).div_(255), labels.to(at::kLong)};
}

}  // namespace snug
