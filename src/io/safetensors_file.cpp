#include "src/io/safetensors_file.h"

#include <algorithm>
#include <array>
#include <optional>
#include <span>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/util/strides.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "src/core/file_memory.h"
#include "src/core/fnv1a.h"

namespace snug::detail {
namespace {

using Dtype = std::pair<std::string_view, at::ScalarType>;

constexpr std::array<Dtype, 16> kDtypes{{
    {"BOOL", at::kBool},
    {"U8", at::kByte},
    {"I8", at::kChar},
    {"F8_E5M2", at::kFloat8_e5m2},
    {"F8_E4M3", at::kFloat8_e4m3fn},
    {"I16", at::kShort},
    {"U16", at::kUInt16},
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"I32", at::kInt},
    {"U32", at::kUInt32},
    {"F32", at::kFloat},
    {"F64", at::kDouble},
    {"I64", at::kLong},
    {"U64", at::kUInt64},
    {"C64", at::kComplexFloat},
}};

// `dtype` is one that parse_safetensors_header has accepted.
at::ScalarType scalar_type(std::string_view dtype) {
  return std::find_if(kDtypes.begin(), kDtypes.end(), [&](const Dtype& item) { return item.first == dtype; })->second;
}

[[noreturn]] void refuse(const std::string& file, const std::string& name, const char* what) {
  throw ConfigError(
      fmt::format("save_safetensors: {}: tensor '{}' {}; leave it out or convert it before saving", file, name, what));
}

std::string_view dtype_name(const at::Tensor& tensor, const std::string& name, const std::string& file) {
  const auto* found = std::find_if(kDtypes.begin(), kDtypes.end(),
                                   [&](const Dtype& item) { return item.second == tensor.scalar_type(); });
  if (found == kDtypes.end()) {
    refuse(file, name, fmt::format("is of dtype {}, which the format lacks", toString(tensor.scalar_type())).c_str());
  }
  return found->first;
}

void check(const at::Tensor& tensor, const std::string& name, const std::string& file) {
  if (name == "__metadata__") {
    refuse(file, name, "has the name that the format reserves");
  }
  if (!tensor.defined()) {
    refuse(file, name, "is undefined");
  }
  if (tensor.layout() != at::kStrided || tensor.is_nested()) {
    refuse(file, name, "is not a dense tensor with data");
  }
}

// Conjugation and negation may be pending flags on a view; contiguous() does not apply them.
at::Tensor plain_copy_or_self(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().to(at::kCPU).contiguous();
}

std::string_view bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

// A byte other than 0 and 1 in a bool is undefined behaviour for every reader.
at::Tensor checked(at::Tensor tensor, const std::string& name, const std::string& file) {
  const std::string_view bytes = tensor.scalar_type() == at::kBool ? bytes_of(tensor) : std::string_view();
  if (std::any_of(bytes.begin(), bytes.end(), [](char byte) { return (byte & ~1) != 0; })) {
    throw CorruptFile(
        fmt::format("load_safetensors: {}: the data of tensor '{}' has bytes that are neither 0 nor 1, but its "
                    "dtype is BOOL; is the file damaged?",
                    file, name));
  }
  return tensor;
}

std::string read_prefix(const InputFile& file) {
  std::string prefix(static_cast<size_t>(std::min(file.size(), kSafetensorsPrefix)), '\0');
  file.read_at(0, prefix);
  return prefix;
}

}  // namespace

SafetensorsContent::SafetensorsContent(const std::map<std::string, at::Tensor>& tensors,
                                       const std::map<std::string, std::string>& metadata, const std::string& file)
    : file_(file) {
  const Writers& writers = Writers::now();
  std::vector<std::pair<std::string, at::Tensor>> ordered(tensors.begin(), tensors.end());
  for (const auto& [name, tensor] : ordered) {
    check(tensor, name, file);
  }
  std::stable_sort(ordered.begin(), ordered.end(),
                   [](const auto& a, const auto& b) { return a.second.element_size() > b.second.element_size(); });
  SafetensorsHeader header;
  int64_t offset = 0;
  for (const auto& [name, tensor] : ordered) {
    const auto size = static_cast<int64_t>(tensor.nbytes());
    header.tensors.push_back({.name = name,
                              .dtype = std::string(dtype_name(tensor, name, file)),
                              .shape = tensor.sizes().vec(),
                              .begin = offset,
                              .end = offset + size});
    offset += size;
  }
  layout_ = fnv1a(format_safetensors_header(header, file));
  header.metadata = metadata;
  header_ = format_safetensors_header(header, file);
  pieces_.push_back({std::ssize(header_), writers.is_first()});
  if (writers.is_first()) {
    parts_.push_back(header_);
  }
  for (const auto& [name, tensor] : ordered) {
    int64_t rest = static_cast<int64_t>(tensor.nbytes());
    for (const Writers::Part& part : writers.parts_of(tensor)) {
      if (part.values.defined()) {
        if (part.values.is_meta()) {
          refuse(file, name, "is not a dense tensor with data");
        }
        tensors_.push_back(plain_copy_or_self(part.values));
        parts_.push_back(bytes_of(tensors_.back()));
      }
      pieces_.push_back({part.bytes, part.values.defined()});
      rest -= part.bytes;
    }
    if (rest != 0) {
      refuse(file, name, "is on the ranks in part only");
    }
  }
}

// Without places the file is new. Of several writers the first has made the file.
void SafetensorsContent::write_parts(FileSystem& files, const std::filesystem::path& path) const {
  std::vector<int64_t> places;
  int64_t place = 0;
  for (const Piece& piece : pieces_) {
    if (piece.is_here) {
      places.push_back(place);
    }
    place += piece.bytes;
  }
  if (!parts_.empty()) {
    files.write_file(path, parts_, Writers::are_several() ? places : std::span<const int64_t>());
  }
}

Checksum SafetensorsContent::write(FileSystem& files, const std::filesystem::path& path) {
  constexpr int64_t kOnce = int64_t{1} << 32;  // counts the writers of a piece, above the 32 bits of its checksum
  Writers& writers = Writers::now();
  std::array<int64_t, 2> of_first{};
  if (writers.is_first()) {
    of_first = {std::ssize(header_), layout_};
  }
  std::vector<int64_t> sums(pieces_.size());
  writers.add_up(of_first);
  pieces_.front().bytes = of_first[0];
  if (Writers::are_several()) {
    writers.first([&] { files.write_file(path, {}); });
  }
  writers.together([&] {
    if (of_first[1] != layout_) {
      throw ConfigError(fmt::format(
          "save_safetensors: {}: this rank has other tensors than rank 0; save tensors of the same names, dtypes and "
          "shapes on all ranks",
          file_));
    }
    write_parts(files, path);
    auto part = parts_.begin();
    for (size_t i = 0; i < pieces_.size(); ++i) {
      if (pieces_[i].is_here) {
        sums[i] = kOnce + checksum_of(std::span(&*part++, 1)).crc32;
      }
    }
  });
  writers.add_up(sums);
  Checksum all;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    if (sums[i] / kOnce != 1) {
      throw ConfigError(
          fmt::format("save_safetensors: {}: a tensor is written by {} ranks; save the same tensors on all ranks, not "
                      "copies on some",
                      file_, sums[i] / kOnce));
    }
    all = joined(all, {pieces_[i].bytes, static_cast<uint32_t>(sums[i])});
  }
  return all;
}

Checksum write_safetensors(FileSystem& files, const std::filesystem::path& path,
                           const std::map<std::string, at::Tensor>& tensors,
                           const std::map<std::string, std::string>& metadata, const std::string& name) {
  std::optional<SafetensorsContent> content;
  Writers::now().together([&] { content.emplace(tensors, metadata, name); });
  return content->write(files, path);
}

SafetensorsReader::SafetensorsReader(const std::filesystem::path& path) : file_(path) {
  const int64_t length = parse_safetensors_length(read_prefix(file_), file_.size(), file_.name());
  std::string json(static_cast<size_t>(length), '\0');
  file_.read_at(kSafetensorsPrefix, json);
  data_begin_ = kSafetensorsPrefix + length;
  header_ = parse_safetensors_header(json, file_.size() - data_begin_, file_.name());
}

at::Tensor SafetensorsReader::read(const SafetensorsEntry& entry) const {
  at::Tensor tensor = at::empty(entry.shape, at::TensorOptions(at::kCPU).dtype(scalar_type(entry.dtype)));
  file_.read_at(data_begin_ + entry.begin, {static_cast<char*>(tensor.mutable_data_ptr()), tensor.nbytes()});
  return tensor;
}

std::map<std::string, at::Tensor> SafetensorsReader::tensors() const {
  std::map<std::string, at::Tensor> result;
  for (const SafetensorsEntry& entry : header_.tensors) {
    result.emplace(entry.name, checked(read(entry), entry.name, file_.name()));
  }
  return result;
}

std::map<std::string, at::Tensor> SafetensorsReader::tensors_in_place() const {
  const auto memory = FileMemory::of(file_.descriptor(), file_.size(), file_.name());
  std::map<std::string, at::Tensor> result;
  for (const SafetensorsEntry& entry : header_.tensors) {
    const at::ScalarType dtype = scalar_type(entry.dtype);
    const int64_t begin = data_begin_ + entry.begin;
    const bool is_aligned = begin % static_cast<int64_t>(c10::elementSize(dtype)) == 0;  // as our own writer sees to
    const at::Tensor tensor =
        is_aligned ? tensor_in(memory, begin, entry.shape, c10::contiguous_strides(entry.shape), dtype) : read(entry);
    result.emplace(entry.name, checked(tensor, entry.name, file_.name()));
  }
  return result;
}

}  // namespace snug::detail
