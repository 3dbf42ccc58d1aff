#include "snug/core/detail/file_memory.h"

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <system_error>

#include <ATen/ops/from_blob.h>
#include <c10/util/ScopeExit.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include "snug/core/bytes.h"
#include "snug/core/error.h"

namespace snug::detail {
namespace {

[[noreturn]] void fail(const char* what, int64_t bytes, const std::string& file, int reason) {
  throw Error(fmt::format("FileMemory: cannot {} {} of {}: {}", what, Bytes(bytes).str(), file,
                          std::generic_category().message(reason)));
}

void* mapped(int descriptor, int64_t bytes, int sharing, const std::string& file) {
  if (bytes == 0) {
    return nullptr;
  }
  void* const data = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, sharing, descriptor, 0);
  if (data == MAP_FAILED) {
    fail("map", bytes, file, errno);
  }
  return data;
}

// Mappings whose pages the file has: others would lose them. They may be released after the program's end.
struct Held {
  std::mutex mutex;
  std::map<const char*, int64_t> mappings;
  std::atomic<int64_t> count{0};
};

Held& held() {
  static auto* instance = new Held;
  return *instance;
}

void advise(const void* data, int64_t bytes, int advice) noexcept {
  if (!FileMemory::holds(data)) {
    return;
  }
  static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(data) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes) + page - 1) / page * page;
  (void)::madvise(reinterpret_cast<void*>(first), end - first, advice);  // a hint
}

}  // namespace

bool FileMemory::holds(const void* data) noexcept {
  Held& all = held();
  if (all.count.load(std::memory_order_relaxed) == 0) {
    return false;
  }
  const std::lock_guard lock(all.mutex);
  const auto* address = static_cast<const char*>(data);
  auto after = all.mappings.upper_bound(address);
  return after != all.mappings.begin() && address < std::prev(after)->first + std::prev(after)->second;
}

void FileMemory::let_go(const void* data, int64_t bytes) noexcept { advise(data, bytes, MADV_DONTNEED); }
void FileMemory::read_ahead(const void* data, int64_t bytes) noexcept { advise(data, bytes, MADV_WILLNEED); }

std::shared_ptr<FileMemory> FileMemory::of(int descriptor, int64_t bytes, const std::string& file) {
  return std::shared_ptr<FileMemory>(new FileMemory(mapped(descriptor, bytes, MAP_PRIVATE, file), bytes));
}

std::shared_ptr<FileMemory> FileMemory::in(const std::filesystem::path& directory, int64_t bytes) {
  std::string name = (directory / "snug-memory-XXXXXX").string();
  const int descriptor = ::mkostemp(name.data(), O_CLOEXEC);
  if (descriptor < 0) {
    fail("make a file for", bytes, directory.string(), errno);
  }
  const auto close = c10::make_scope_exit([&] { ::close(descriptor); });
  ::unlink(name.c_str());
  // Without room on the disk, writing a page would end the process.
  if (const int reason = bytes == 0 ? 0 : ::posix_fallocate(descriptor, 0, bytes); reason != 0) {
    fail("find room for", bytes, name, reason);
  }
  auto memory = std::shared_ptr<FileMemory>(new FileMemory(mapped(descriptor, bytes, MAP_SHARED, name), bytes));
  if (bytes > 0) {
    Held& all = held();
    const std::lock_guard lock(all.mutex);
    all.mappings.emplace(memory->data(), bytes);
    ++all.count;
    memory->is_held_ = true;
  }
  return memory;
}

FileMemory::~FileMemory() {
  if (is_held_) {
    Held& all = held();
    const std::lock_guard lock(all.mutex);
    all.mappings.erase(data());
    --all.count;
  }
  if (data_ != nullptr) {
    ::munmap(data_, static_cast<size_t>(bytes_));
  }
}

void let_go_of_pages(const at::Tensor& tensor) {
  if (tensor.is_cpu() && tensor.numel() > 0) {
    FileMemory::let_go(tensor.const_data_ptr(), static_cast<int64_t>(tensor.nbytes()));
  }
}

at::Tensor tensor_in(const std::shared_ptr<FileMemory>& memory, int64_t offset, at::IntArrayRef sizes,
                     at::IntArrayRef strides, at::ScalarType dtype) {
  return at::from_blob(
      memory->data() + offset, sizes, strides, [memory](void*) {}, at::TensorOptions(at::kCPU).dtype(dtype));
}

}  // namespace snug::detail
