#include <utility>

#include "snug/core.h"
#include "snug/memory.h"
#include "src/memory/cpu_allocator.h"

namespace snug {

TensorsInFile::TensorsInFile(std::filesystem::path directory) {
  detail::require_cpu_allocator();
  if (directory.empty()) {
    throw ConfigError("TensorsInFile: the directory is empty; give one on a disk");
  }
  allocations_ = std::make_unique<detail::AllocationsInFile>(std::move(directory));
}

TensorsInFile::~TensorsInFile() = default;

}  // namespace snug
