// The store for CPU storages is a file (spill_file.cpp). offload_store.cpp says why and when storages leave.

#include <memory>
#include <utility>

#include <c10/core/CPUAllocator.h>

#include "src/activations/offload_store.h"
#include "src/activations/spill_file.h"

namespace snug::detail {
namespace {

// Converts a storage into the file's type; storage_of() converts back.
SpillMemory spill_memory_of(c10::Storage storage) {
  auto owner = std::make_shared<c10::Storage>(std::move(storage));
  // The file only reads the given memory.
  return {owner, const_cast<void*>(owner->data()), static_cast<int64_t>(owner->nbytes())};
}

c10::Storage storage_of(const SpillMemory& memory) { return *std::static_pointer_cast<c10::Storage>(memory.owner); }

// Makes a storage without the dispatcher: no mode that watches operators may see the allocation.
SpillMemory allocate(int64_t bytes) {
  return spill_memory_of(c10::Storage(c10::Storage::use_byte_size_t(), c10::SymInt(bytes), c10::GetCPUAllocator(),
                                      /*resizable=*/true));
}

class Spilled final : public StoredAway {
 public:
  explicit Spilled(std::unique_ptr<SpillFile::Piece> piece) : piece_(std::move(piece)) {}
  c10::Storage load() override { return storage_of(piece_->load()); }
  void prefetch() override { piece_->prefetch(); }
  void drop_prefetch() override { piece_->drop_prefetch(); }
  bool finish() override { return piece_->finish(); }

 private:
  std::unique_ptr<SpillFile::Piece> piece_;
};

class SpillStore final : public OffloadStore {
 public:
  SpillStore(const OffloadOptions& options, SpillCalls& calls)
      : file_(options.directory, options.cap.count(), &allocate, calls) {}

  std::unique_ptr<StoredAway> store(const c10::Storage& storage) override {
    auto piece = file_.store(spill_memory_of(storage));
    return piece ? std::make_unique<Spilled>(std::move(piece)) : nullptr;
  }

 private:
  SaveOnHost::Report transfers() const override { return file_.report(); }

  SpillFile file_;
};

}  // namespace

std::unique_ptr<OffloadStore> make_spill_store(const OffloadOptions& options, SpillCalls& calls) {
  return std::make_unique<SpillStore>(options, calls);
}

}  // namespace snug::detail
