#include <utility>

#include "snug/core.h"
#include "snug/memory.h"
#include "src/memory/cpu_allocator.h"

namespace snug {

class TensorsInFile::Impl {
 public:
  explicit Impl(std::filesystem::path directory) : directory_(std::move(directory)), allocations_(directory_) {}

 private:
  std::filesystem::path directory_;
  detail::AllocationsInFile allocations_;
};

TensorsInFile::TensorsInFile(std::filesystem::path directory) {
  detail::require_cpu_allocator();
  if (directory.empty()) {
    throw ConfigError("TensorsInFile: the directory is empty; give one on a disk");
  }
  impl_ = std::make_unique<Impl>(std::move(directory));
}

TensorsInFile::~TensorsInFile() = default;

}  // namespace snug
