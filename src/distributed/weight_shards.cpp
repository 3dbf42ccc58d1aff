#include "src/distributed/weight_shards.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <system_error>
#include <unordered_map>
#include <utility>

#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "src/core/file_memory.h"
#include "src/core/has_bytes.h"
#include "src/distributed/process_group_impl.h"
#include "src/memory/absent_storage.h"

namespace snug::detail {
namespace {

// Tags. Several weights may be on their way from a rank, each under a tag of its own.
constexpr int kRequest = 0;
int tag_of_answer(size_t weight) { return static_cast<int>(weight) + 1; }
constexpr std::chrono::hours kForEver(24 * 365);

at::Tensor as_tensor(int64_t& number) { return at::from_blob(&number, {1}, at::kLong); }
at::Tensor as_tensor(void* memory, size_t bytes) {
  return at::from_blob(memory, {static_cast<int64_t>(bytes)}, at::kByte);
}

// Weights may have been made in files (TensorsInFile), because the whole model has no room in memory.
void move_into_memory(const c10::Storage& storage) {
  if (const void* place = memory_of(storage).get(); FileMemory::holds(place)) {
    c10::DataPtr memory = c10::GetCPUAllocator()->allocate(storage.nbytes());
    std::memcpy(memory.get(), place, storage.nbytes());
    storage.set_data_ptr_noswap(std::move(memory));
  }
}

// The address is that of the storage itself: different for each storage, and never read. A storage without bytes is
// read without memory.
void release(const c10::Storage& storage) {
  if (storage.nbytes() == 0) {
    return;
  }
  take_memory(
      storage, storage.unsafeGetStorageImpl(),
      "DataParallel: this weight is on another rank, and comes for each operator that the thread of the "
      "DataParallel calls; use an operator on that thread, such as weight.clone(), instead of a pointer or another "
      "thread, or call gather_weights()");
}

}  // namespace

// A weight on its way to this rank.
struct WeightShards::Coming {
  c10::DataPtr memory;
  std::unique_ptr<int64_t> request;
  c10::intrusive_ptr<c10d::Work> arrives, asks;  // end before memory and request
};

// Memory comes from LibTorch's allocator, because the whole window counts already. A weight that was asked for is still
// absent until an operator uses the weight.
class WeightShards::Home final : public CountedHome {
 public:
  Home(WeightShards& shards, int64_t window) : CountedHome(window), shards_(shards) {}

  bool brings_beside_operators() const override { return true; }
  void bring(size_t number) override {
    check_failure();
    coming_.emplace(number, shards_.ask_for(number, c10::GetDefaultCPUAllocator()->allocate(storage(number).nbytes())));
  }
  void use(size_t number) override {
    if (const auto coming = coming_.find(number); coming != coming_.end()) {
      give_memory(storage(number), take(coming->second));
      coming_.erase(coming);
    }
  }
  // A value that an operator of this rank has written is lost. If all ranks write alike, the owner has the value. A
  // weight that is on its way arrives first: its owner waits to send the next one.
  void let_go(size_t number, bool /*is_written*/) override {
    if (auto coming = coming_.extract(number); !coming.empty() && !failure_) {
      try {
        take(coming.mapped());
      } catch (const std::exception&) {  // the next weight's use tells
      }
    }
    release(storage(number));
  }

 private:
  const c10::Storage& storage(size_t number) const { return shards_.weights_[shards_.elsewhere_[number]].storage; }

  c10::DataPtr take(Coming& coming) {
    check_failure();
    try {
      return shards_.arrived(coming);
    } catch (...) {
      failure_ = std::current_exception();
      throw;
    }
  }
  void check_failure() const {
    if (failure_) {
      std::rethrow_exception(failure_);
    }
  }

  WeightShards& shards_;
  std::unordered_map<size_t, Coming> coming_;
  std::exception_ptr failure_;  // of an arrival: the group cannot be used any more
};

WeightShards::WeightShards(ProcessGroup& all, ProcessGroup& group, std::vector<Weight> weights, int64_t window,
                           const std::function<void(size_t number)>& send_first)
    : KeptOnRanks(all),
      all_(all),
      group_(group),
      weights_(std::move(weights)),
      requests_(static_cast<size_t>(group.size())),
      waits_(static_cast<size_t>(group.size())) {
  if (group_.size() > 1) {  // first: an exception leaves all weights as they are
    ProcessGroup::Impl& impl = group_.impl();
    backend_ = impl.attempt("shard the weights", [&] { return impl.make_group(group_.size())->impl().backend; });
  }
  try {
    start_threads();
    move_weights(window, send_first);
  } catch (...) {  // the destructor does not run
    end_threads();
    throw;
  }
  answers_ = true;
  answers_.notify_all();
}

void WeightShards::start_threads() {
  std::exception_ptr failure;
  try {
    for (int rank = 0; rank < group_.size(); ++rank) {
      if (rank != group_.rank()) {
        threads_.emplace_back([this, rank] { answer(rank); });
      }
    }
  } catch (const std::system_error& error) {
    failure = std::make_exception_ptr(Error(fmt::format(
        "DataParallel: rank {} cannot start the threads that answer for its weights: {}; raise the limit of "
        "processes (ulimit -u), or shard no weights",
        all_.rank(), error.what())));
  }
  if (const auto rank = failed_rank(all_, failure)) {
    throw Error(fmt::format(
        "DataParallel: rank {} cannot start threads, so all ranks keep all weights; its own message is on its standard "
        "error",
        *rank));
  }
}

void WeightShards::move_weights(int64_t window, const std::function<void(size_t number)>& send_first) {
  std::vector<c10::Storage> storages;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const Weight& weight = weights_[i];
    send_first(i);
    if (weight.owner == group_.rank()) {
      move_into_memory(weight.storage);
    } else {
      release(weight.storage);
      elsewhere_.push_back(i);
      storages.push_back(weight.storage);
    }
  }
  if (group_.size() == 1) {
    return;
  }
  seam_.emplace();
  const int64_t bytes = std::min(bytes_elsewhere(), window > 0 ? window : WeightWindow::bytes_for(storages, 2));
  is_given_ = window > 0;
  home_ = std::make_unique<Home>(*this, bytes);
  window_.emplace(std::move(storages), *home_, bytes);
}

WeightShards::~WeightShards() {
  try {
    finish_reading();
  } catch (const std::exception&) {  // the other ranks have ended
  }
  window_.reset();
  end_threads();
}

void WeightShards::end_threads() noexcept {
  is_over_ = answers_ = true;
  answers_.notify_all();
  {
    const std::lock_guard lock(mutex_);
    for (const auto& wait : waits_) {
      if (wait) {
        wait->abort();
      }
    }
  }
  for (std::thread& thread : threads_) {
    thread.join();
  }
}

void WeightShards::finish_reading() {
  if (window_) {
    window_->let_go();
  }
}

void WeightShards::written() {
  group_.barrier();
  finish_reading();
}

void WeightShards::bring_all() {
  finish_reading();
  widen(0);
  std::vector<c10::DataPtr> memory;
  std::exception_ptr failure;
  try {
    for (const size_t number : elsewhere_) {
      memory.push_back(c10::GetCPUAllocator()->allocate(weights_[number].storage.nbytes()));
    }
  } catch (...) {
    failure = std::current_exception();
    memory.clear();
  }
  if (const auto rank = failed_rank(all_, failure)) {
    throw Error(fmt::format(
        "DataParallel.gather_weights: rank {} has no memory for all weights, so all weights stay in shards", *rank));
  }
  window_.reset();
  home_.reset();
  for (size_t i = 0; i < elsewhere_.size(); ++i) {
    Coming coming = ask_for(i, std::move(memory[i]));
    give_memory(weights_[elsewhere_[i]].storage, arrived(coming));
  }
  group_.barrier();  // no rank needs an answer any more
}

std::vector<Writers::Part> WeightShards::parts_of(const at::Tensor& tensor) const {
  const c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const auto found = std::ranges::find_if(
      weights_, [&](const Weight& weight) { return weight.storage.unsafeGetStorageImpl() == storage; });
  if (found == weights_.end()) {
    return {};
  }
  const bool is_written_here = found->owner == all_.rank();  // by the first group
  return {{static_cast<int64_t>(tensor.nbytes()), is_written_here ? tensor : at::Tensor()}};
}

int64_t WeightShards::widen(int64_t bytes) {
  if (!window_ || is_given_) {
    return 0;
  }
  const int64_t least = window_bytes() - spare_;
  if (const int64_t more = std::min(bytes, bytes_elsewhere() - least); window_->should_widen(spare_, more)) {
    window_->let_go();
    window_->resize(least);
    spare_ = 0;
    home_->widen(more);
    window_->resize(least + more);
    spare_ = more;
  }
  return spare_;
}

int64_t WeightShards::bytes_elsewhere() const {
  int64_t bytes = 0;
  for (const size_t number : elsewhere_) {
    bytes += static_cast<int64_t>(weights_[number].storage.nbytes());
  }
  return bytes;
}

WeightShards::Coming WeightShards::ask_for(size_t number, c10::DataPtr memory) {
  const size_t in_all = elsewhere_[number];
  const Weight& weight = weights_[in_all];
  Coming coming{.memory = std::move(memory),
                .request = std::make_unique<int64_t>(static_cast<int64_t>(in_all)),
                .arrives = {},
                .asks = {}};
  if (weight.storage.nbytes() > 0) {
    group_.impl().named("bring a weight", [&] {
      coming.arrives = start_receive(*backend_, as_tensor(coming.memory.get(), weight.storage.nbytes()), weight.owner,
                                     tag_of_answer(in_all));
      coming.asks = start_send(*backend_, as_tensor(*coming.request), weight.owner, kRequest);
    });
    bytes_received_ += static_cast<int64_t>(weight.storage.nbytes());
  }
  return coming;
}

c10::DataPtr WeightShards::arrived(Coming& coming) {
  if (coming.arrives) {
    group_.impl().named("bring a weight", [&] {
      coming.asks->wait();
      coming.arrives->wait();
    });
  }
  return std::move(coming.memory);
}

// The thread for requests of `rank`. The end of the other rank, or of this object, ends the thread.
void WeightShards::answer(int rank) noexcept {
  answers_.wait(false);
  try {
    for (;;) {
      int64_t& request = requests_[static_cast<size_t>(rank)];
      const auto arrives = start_receive(*backend_, as_tensor(request), rank, kRequest);
      {
        const std::lock_guard lock(mutex_);
        waits_[static_cast<size_t>(rank)] = arrives;
      }
      if (is_over_ || !arrives->wait(kForEver) || is_over_) {
        return;
      }
      const auto number = static_cast<size_t>(request);
      const c10::Storage& storage = weights_[number].storage;
      start_send(*backend_, as_tensor(storage.mutable_data(), storage.nbytes()), rank, tag_of_answer(number))->wait();
    }
  } catch (const std::exception&) {  // the other rank throws, or has ended
  }
}

}  // namespace snug::detail
