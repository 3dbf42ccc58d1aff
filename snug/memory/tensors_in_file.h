#pragma once
// TensorsInFile: builds a model whose weights do not fit into memory.
//
//   std::optional<snug::TensorsInFile> in_file(std::in_place, "run");
//   auto model = MyModel();          // its weights are in a file in "run"
//   in_file.reset();
//   snug::AdamW optimizer(model->parameters());
//   snug::Stepper stepper(model, optimizer, {.memory_budget = snug::Bytes::parse("1GiB"), .offload = "run"});

#include <filesystem>
#include <memory>

namespace snug {

/// While it lives, each CPU tensor of 64 KiB and more that this thread makes lies in a file of its own, which has no
/// name. The system reads its pages when they are accessed and writes them back when it needs the memory. Such a tensor
/// is used as any other. It is no live tensor memory: no MemoryLimit counts it. It stays in its file, unless a Stepper
/// with `offload` plans its model into memory. Several of these end in the reverse of the order in which they began.
///
/// Making such a tensor throws Error if the directory has no room. If the disk fails later, an access ends the process.
/// After fork() both processes write to the same tensors.
class [[nodiscard]] TensorsInFile final {
 public:
  /// `directory`: on a disk; in one that is memory itself (tmpfs) nothing is gained. Throws ConfigError if it is empty.
  explicit TensorsInFile(std::filesystem::path directory);
  ~TensorsInFile();
  TensorsInFile(const TensorsInFile&) = delete;
  TensorsInFile& operator=(const TensorsInFile&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace snug
