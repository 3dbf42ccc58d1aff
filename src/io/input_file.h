#pragma once
// InputFile: reads bytes from any place in a file directly into the target memory.

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

namespace snug::detail {

class InputFile final {
 public:
  /// Throws Error if the file cannot be opened or is not a regular one.
  explicit InputFile(const std::filesystem::path& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  /// In bytes, when the file was opened.
  int64_t size() const { return size_; }
  const std::string& name() const { return name_; }
  int descriptor() const { return descriptor_; }

  /// Fills `target` with the bytes from `offset` on. Throws Error if they cannot be read,
  /// CorruptFile if the file ends before.
  void read_at(int64_t offset, std::span<char> target) const;

 private:
  std::string name_;
  int descriptor_ = -1;
  int64_t size_ = 0;
};

}  // namespace snug::detail
