#include "src/core/file_memory.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
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

#include "snug/core.h"
#include "src/core/has_bytes.h"
#include "src/core/unnamed_file.h"

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

// Mappings whose pages the file has: other mappings would lose the pages. A mapping may be released after the program's
// end.
struct Held {
  std::mutex mutex;
  std::map<const char*, int64_t> mappings;
  std::atomic<int64_t> count{0};
};

Held& held() {
  static auto* instance = new Held;
  return *instance;
}

// Bytes from `data` to the end of the mapping around `data`; 0 if no mapping contains `data`. The mapping lives as long
// as the caller owns the memory.
int64_t held_from(const void* data) noexcept {
  Held& all = held();
  if (all.count.load(std::memory_order_relaxed) == 0) {
    return 0;
  }
  const std::lock_guard lock(all.mutex);
  const auto* address = static_cast<const char*>(data);
  const auto after = all.mappings.upper_bound(address);
  if (after == all.mappings.begin()) {
    return 0;
  }
  const auto& [begin, bytes] = *std::prev(after);
  return std::max<int64_t>(0, begin + bytes - address);
}

// Never advises beyond the mapping: other memory would lose its content.
void advise(const void* data, int64_t bytes, int advice) noexcept {
  bytes = std::min(bytes, held_from(data));
  if (bytes == 0) {
    return;
  }
  static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(data) / page * page;
  const auto end = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes) + page - 1) / page * page;
  (void)::madvise(reinterpret_cast<void*>(first), end - first, advice);  // madvise is a hint, so errors are ignored
}

}  // namespace

bool FileMemory::holds(const void* data) noexcept { return held_from(data) > 0; }

void FileMemory::let_go(const void* data, int64_t bytes) noexcept { advise(data, bytes, MADV_DONTNEED); }
void FileMemory::read_ahead(const void* data, int64_t bytes) noexcept { advise(data, bytes, MADV_WILLNEED); }

std::shared_ptr<FileMemory> FileMemory::of(int descriptor, int64_t bytes, const std::string& file) {
  return std::shared_ptr<FileMemory>(new FileMemory(mapped(descriptor, bytes, MAP_PRIVATE, file), bytes));
}

std::shared_ptr<FileMemory> FileMemory::in(const std::filesystem::path& directory, int64_t bytes) {
  const std::string file = fmt::format("a file in {}", directory.string());
  const int descriptor = open_unnamed(directory);
  if (descriptor < 0) {
    fail("make a file for", bytes, directory.string(), errno);
  }
  const auto close = c10::make_scope_exit([&] { ::close(descriptor); });
  // Without room on the disk, writing a page would end the process.
  int reason = 0;
  do {
    reason = bytes == 0 ? 0 : ::posix_fallocate(descriptor, 0, bytes);
  } while (reason == EINTR);
  if (reason != 0) {
    fail("find room for", bytes, file, reason);
  }
  auto memory = std::shared_ptr<FileMemory>(new FileMemory(mapped(descriptor, bytes, MAP_SHARED, file), bytes));
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
  if (is_in_file(tensor)) {
    FileMemory::let_go(tensor.const_data_ptr(), static_cast<int64_t>(tensor.nbytes()));
  }
}

bool is_in_file(const at::Tensor& tensor) {
  return tensor.is_cpu() && tensor.has_storage() && FileMemory::holds(memory_of(tensor.storage()).get());
}

void for_each_in_files(const std::vector<at::Tensor>& tensors, const std::function<void(at::TensorList)>& work) {
  const bool are_in_files = std::any_of(tensors.begin(), tensors.end(), is_in_file);
  if (!are_in_files && !tensors.empty()) {
    work(tensors);
  }
  for (size_t i = 0; are_in_files && i < tensors.size(); ++i) {
    work({tensors[i]});
    let_go_of_pages(tensors[i]);
  }
}

at::Tensor tensor_in(const std::shared_ptr<FileMemory>& memory, int64_t offset, at::IntArrayRef sizes,
                     at::IntArrayRef strides, at::ScalarType dtype) {
  return at::from_blob(
      memory->data() + offset, sizes, strides, [memory](void*) {}, at::TensorOptions(at::kCPU).dtype(dtype));
}

}  // namespace snug::detail
