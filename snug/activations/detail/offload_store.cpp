#include "snug/activations/detail/offload_store.h"

#include <mutex>
#include <utility>

namespace snug::detail {
namespace {

class ByDevice final : public OffloadStore {
 public:
  explicit ByDevice(OffloadOptions options) : options_(std::move(options)) {
    if (!options_.directory.empty()) {
      on_cpu_ = make_spill_store(options_);
    }
  }

  std::unique_ptr<StoredAway> store(const c10::Storage& storage) override {
    OffloadStore* const of_device = of(storage.device());
    return of_device == nullptr ? nullptr : of_device->store(storage);
  }

  OffloadReport report() const override {
    const std::lock_guard lock(mutex_);
    OffloadReport sum;
    for (const auto* store : {on_cpu_.get(), on_cuda_.get()}) {
      if (store != nullptr) {
        const OffloadReport one = store->report();
        sum.bytes_out += one.bytes_out;
        sum.bytes_back += one.bytes_back;
        sum.bytes_kept += one.bytes_kept;
        sum.failed_writes += one.failed_writes;
        sum.failure += one.failure;
      }
    }
    return sum;
  }

 private:
  OffloadStore* of(c10::Device device) {
    const std::lock_guard lock(mutex_);
    if (device.is_cpu()) {
      return (on_cpu_ ? on_cpu_ : on_cpu_ = make_spill_store(options_)).get();
    }
    if (device.is_cuda()) {
      return (on_cuda_ ? on_cuda_ : on_cuda_ = make_pinned_store(options_)).get();
    }
    return nullptr;
  }

  const OffloadOptions options_;
  mutable std::mutex mutex_;  // guards what follows
  std::unique_ptr<OffloadStore> on_cpu_;
  std::unique_ptr<OffloadStore> on_cuda_;
};

}  // namespace

std::unique_ptr<OffloadStore> make_offload_store(const OffloadOptions& options) {
  return std::make_unique<ByDevice>(options);
}

}  // namespace snug::detail
