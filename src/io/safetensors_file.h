#pragma once
// Conversion of tensors to and from the bytes of a safetensors file; the basis of safetensors.h and snapshot.h.

#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "src/core/file_system.h"
#include "src/core/writers.h"
#include "src/io/checksum.h"
#include "src/io/input_file.h"
#include "src/io/safetensors_header.h"

namespace snug::detail {

/// The content of a file to be written, in pieces. Tensors are ordered as in Python's writer, by element size from
/// large to small and then by name, so that each is aligned to its elements.
class SafetensorsContent {
 public:
  /// Copies only tensors that are not contiguous CPU memory already. `file` is for messages.
  /// Throws ConfigError as save_safetensors does.
  SafetensorsContent(const std::map<std::string, at::Tensor>& tensors,
                     const std::map<std::string, std::string>& metadata, const std::string& file);
  SafetensorsContent(const SafetensorsContent&) = delete;
  SafetensorsContent& operator=(const SafetensorsContent&) = delete;

  /// The bytes that this process writes; they live as long as this object.
  const std::vector<std::string_view>& parts() const { return parts_; }

  /// Writes the file by all Writers::now(), with the header of the first. Returns the file's checksum.
  Checksum write(FileSystem& files, const std::filesystem::path& path);

 private:
  struct Piece {
    int64_t bytes;
    bool is_here;
  };

  void write_parts(FileSystem& files, const std::filesystem::path& path) const;

  std::string file_;
  std::string header_;
  uint32_t layout_ = 0;        // a hash of names, dtypes and shapes
  std::vector<Piece> pieces_;  // of the file: the header, and parts of tensors
  std::vector<at::Tensor> tensors_;
  std::vector<std::string_view> parts_;  // of the pieces that are here
};

/// Writes a file by all Writers::now(). Returns its checksum. `name` is for messages. Throws ConfigError as
/// save_safetensors does.
Checksum write_safetensors(FileSystem& files, const std::filesystem::path& path,
                           const std::map<std::string, at::Tensor>& tensors,
                           const std::map<std::string, std::string>& metadata, const std::string& name);

/// A file whose header has been read and checked.
class SafetensorsReader {
 public:
  /// Throws CorruptFile, or Error if the file cannot be read.
  explicit SafetensorsReader(const std::filesystem::path& path);

  const SafetensorsHeader& header() const { return header_; }

  /// All tensors, each in new CPU memory.
  std::map<std::string, at::Tensor> tensors() const;
  /// All tensors, in the file itself: see FileMemory.
  std::map<std::string, at::Tensor> tensors_in_place() const;

 private:
  at::Tensor read(const SafetensorsEntry& entry) const;

  InputFile file_;
  int64_t data_begin_ = 0;
  SafetensorsHeader header_;
};

}  // namespace snug::detail
