#include "src/memory/absent_storage.h"

#include <memory>
#include <utility>

#include <torch/version.h>

#include "src/core/has_bytes.h"

namespace snug::detail {

// LibTorch before 2.13 can set, and cannot clear, the mark of a storage that must not be read. The mark is a private
// member. An explicit instantiation may name private members.
#define SNUG_CANNOT_CLEAR_MARK (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13)
#if SNUG_CANNOT_CLEAR_MARK
constexpr auto mark_of_storage();
template <auto Member>
struct MarkOfStorage {
  friend constexpr auto mark_of_storage() { return Member; }
};
template struct MarkOfStorage<&c10::StorageImpl::throw_on_immutable_data_ptr_>;
#endif

namespace {

void keep_memory(void*) {}

void drop_values(void* values) { delete static_cast<at::Tensor*>(values); }

}  // namespace

void give_memory(const c10::Storage& storage, c10::DataPtr memory) {
  c10::StorageImpl& impl = *storage.unsafeGetStorageImpl();
#if SNUG_CANNOT_CLEAR_MARK
  impl.*mark_of_storage() = false;
#else
  impl.clear_data_ptr_access_error_msg_();
#endif
  impl.set_data_ptr_noswap(std::move(memory));
}

void take_memory(const c10::Storage& storage, void* address, std::string why) {
  give_memory(storage, borrowed_memory(address, storage.device()));
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(why));
}

void take_memory(const c10::Storage& storage, const at::Tensor& values, std::string why) {
  auto kept = std::make_unique<at::Tensor>(values);
  give_memory(storage, {values.mutable_data_ptr(), kept.release(), &drop_values, storage.device()});
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(std::move(why));
}

at::Tensor kept_values(const c10::Storage& storage) {
  const c10::DataPtr& memory = memory_of(storage);
  return memory.get_deleter() == &drop_values ? *static_cast<const at::Tensor*>(memory.get_context()) : at::Tensor();
}

c10::DataPtr borrowed_memory(void* address, c10::Device device) { return {address, nullptr, &keep_memory, device}; }

bool is_borrowed_or_absent(const c10::DataPtr& memory) {
  return memory.get_deleter() == &keep_memory || memory.get_deleter() == &drop_values;
}

}  // namespace snug::detail
