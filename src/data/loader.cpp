#include "snug/loader.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/StringUtil.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "snug/sampler.h"
#include "src/data/shares.h"

namespace snug {
namespace {

// SplitMix64's finaliser (Steele et al. 2014): numbers that differ in one bit become very different numbers.
uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

std::string described(const at::Tensor& tensor) {
  return tensor.defined() ? c10::str(tensor.scalar_type(), " ", tensor.sizes()) : "undefined";
}

// The begin of a batch.
struct Position {
  int64_t epoch = 0;
  int64_t position = 0;
};

struct Job {
  Position place;
  std::vector<int64_t> indices = {};       // of this rank's items; if none, of an item that shows sizes and types
  bool is_empty = false;                   // the rank has no items in this batch
  bool is_taken = false, is_done = false;  // taken or done by a worker
  std::vector<at::Tensor> batch = {};
  std::exception_ptr error = {};
};

const LoaderOptions& checked(const ItemSource& source, const LoaderOptions& options) {
  const auto require = [](bool holds, const char* what, int64_t value, const char* cure) {
    if (!holds) {
      throw ConfigError(fmt::format("Loader: {} is {}; {}", what, value, cure));
    }
  };
  require(source.size >= 1, "the size of the source", source.size, "there must be an item");
  require(options.batch >= 1, "batch", options.batch, "give at least 1");
  require(!options.drop_last || options.batch <= source.size, "batch", options.batch,
          "with drop_last it must not be above the number of items");
  require(options.workers >= 0, "workers", options.workers, "give 0 or more");
  require(options.ahead >= 1, "ahead", options.ahead, "give at least 1");
  require(options.ranks >= 1, "ranks", options.ranks, "give at least 1");
  require(0 <= options.rank && options.rank < options.ranks, "rank", options.rank, "give 0 to ranks - 1");
  if (!source.get) {
    throw ConfigError("Loader: the source has no get()");
  }
  if (options.pin_memory && at::accelerator::deviceCount() == 0) {
    throw ConfigError("Loader: pin_memory is true, and there is no accelerator; set it to !device.is_cpu()");
  }
  return options;
}

}  // namespace

class Loader::Impl {
 public:
  Impl(ItemSource source, LoaderOptions options)
      : options_(checked(source, options)), source_(std::move(source)), order_(source_.size, options_.seed) {
    const std::lock_guard lock(mutex_);
    plan();
    for (int i = 0; i < options_.workers; ++i) {
      workers_.emplace_back([this] { work(); });
    }
  }

  ~Impl() {
    {
      const std::lock_guard lock(mutex_);
      is_over_ = true;
    }
    changed_.notify_all();
    for (std::thread& worker : workers_) {
      worker.join();
    }
  }

  std::optional<std::vector<at::Tensor>> next() {
    if (here_.position >= used()) {
      here_ = {here_.epoch + 1, 0};
      return std::nullopt;
    }
    std::unique_lock lock(mutex_);
    const std::shared_ptr<Job> job = jobs_.front();
    if (workers_.empty()) {
      make(*job);
    }
    changed_.wait(lock, [&] { return job->is_done; });
    if (job->error) {
      const std::exception_ptr error = std::exchange(job->error, nullptr);
      job->is_taken = job->is_done = false;
      lock.unlock();
      changed_.notify_all();
      std::rethrow_exception(error);
    }
    jobs_.pop_front();
    here_.position = std::min(here_.position + options_.batch, used());
    plan();
    lock.unlock();
    changed_.notify_all();
    return std::move(job->batch);
  }

  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] {
      return workers_.empty() ||
             (making_ == 0 && std::ranges::all_of(jobs_, [](const auto& job) { return job->is_done; }));
    });
  }

  Position here() const { return here_; }

  // The items of an epoch that are in a batch.
  int64_t used() const { return options_.drop_last ? source_.size / options_.batch * options_.batch : source_.size; }

  int64_t batches() const { return (used() + options_.batch - 1) / options_.batch; }

  StateDict state_dict() const {
    StateDict state;
    state.set("epoch", here_.epoch);
    state.set("position", here_.position);
    for (const auto& [name, value] : kinds()) {
      state.set(name, value);
    }
    return state;
  }

  void load_state_dict(const StateDict& state) {
    for (const auto& [name, value] : kinds()) {
      if (const auto saved = state.get<int64_t>(name); saved != value) {
        throw CorruptFile(fmt::format(
            "Loader: the state's {} is {}, and this loader's {}; their orders are not the same", name, saved, value));
      }
    }
    const Position place{state.get<int64_t>("epoch"), state.get<int64_t>("position")};
    if (place.epoch < 0 || place.position < 0 || place.position > used()) {
      throw CorruptFile(fmt::format("Loader: the state stands at item {} of epoch {}, where an epoch has {}",
                                    place.position, place.epoch, used()));
    }
    {
      const std::lock_guard lock(mutex_);
      jobs_.clear();  // a worker that makes a job keeps the job alive until the end
      here_ = place;
      planned_ = place;
      plan();
    }
    changed_.notify_all();
  }

 private:
  std::vector<std::pair<std::string, int64_t>> kinds() const {
    return {{"size", source_.size},
            {"seed", static_cast<int64_t>(options_.seed)},
            {"batch", options_.batch},
            {"shuffle", options_.shuffle ? 1 : 0},
            {"drop_last", options_.drop_last ? 1 : 0}};
  }

  // Adds jobs until as many jobs exist as may be ahead. The caller has the lock.
  void plan() {
    while (std::ssize(jobs_) < options_.ahead) {
      if (planned_.position >= used()) {
        planned_ = {planned_.epoch + 1, 0};
      }
      const int64_t count = std::min(options_.batch, used() - planned_.position);
      auto indices = share_of(planned_, count, options_.rank, options_.ranks);
      const bool is_empty = indices.empty();
      if (is_empty) {
        indices = share_of(planned_, 1, 0, 1);
      }
      jobs_.push_back(
          std::make_shared<Job>(Job{.place = planned_, .indices = std::move(indices), .is_empty = is_empty}));
      planned_.position += count;
    }
  }

  // The data set's numbers of a rank's items in a batch of `count` items.
  std::vector<int64_t> share_of(const Position& place, int64_t count, int64_t rank, int64_t ranks) {
    if (options_.shuffle) {
      order_.seek(place.epoch, place.position);
      return order_.next(count, rank, ranks);
    }
    const int64_t begin = detail::share_begin(count, rank, ranks);
    std::vector<int64_t> indices(static_cast<size_t>(detail::share_begin(count, rank + 1, ranks) - begin));
    std::iota(indices.begin(), indices.end(), place.position + begin);
    return indices;
  }

  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      std::shared_ptr<Job> job;
      changed_.wait(lock, [&] {
        const auto found = std::ranges::find_if(jobs_, [](const auto& candidate) { return !candidate->is_taken; });
        job = found == jobs_.end() ? nullptr : *found;
        return is_over_ || job;
      });
      if (is_over_) {
        return;
      }
      job->is_taken = true;
      ++making_;
      lock.unlock();
      make(*job);
      lock.lock();
      --making_;
      changed_.notify_all();
    }
  }

  // Called only by the thread that took the job. The consumer reads the results after is_done, under the lock.
  void make(Job& job) {
    std::vector<at::Tensor> batch;
    std::exception_ptr error;
    try {
      batch = stacked(job);
    } catch (...) {
      error = std::current_exception();
    }
    const auto publish = [&] {
      job.batch = std::move(batch);
      job.error = error;
      job.is_done = true;
    };
    if (workers_.empty()) {
      publish();  // next() has the lock
    } else {
      const std::lock_guard lock(mutex_);
      publish();
    }
  }

  std::vector<at::Tensor> stacked(const Job& job) const {
    const at::NoGradGuard no_grad;
    std::vector<std::vector<at::Tensor>> columns;
    for (size_t i = 0; i < job.indices.size(); ++i) {
      const int64_t index = job.indices[i];
      const auto fail = [&](const std::string& what) {
        const std::string name = source_.name ? fmt::format(" ('{}')", source_.name(index)) : "";
        throw Error(fmt::format("Loader: item {}{}: {}", index, name, what));
      };
      const uint64_t seed = mixed(mixed(options_.seed + 0x9e3779b97f4a7c15U * static_cast<uint64_t>(job.place.epoch)) +
                                  static_cast<uint64_t>(index));
      ItemSource::Item item;
      try {
        item = source_.get(index, seed);
      } catch (const std::exception& error) {
        fail(error.what());
      }
      if (i == 0) {
        columns.resize(item.size());
      }
      if (item.empty() || item.size() != columns.size()) {
        fail(fmt::format("it has {} tensors, and the first of the batch {}", item.size(), columns.size()));
      }
      for (size_t k = 0; k < item.size(); ++k) {
        const at::Tensor& first = i == 0 ? item[k] : columns[k].front();
        if (!item[k].defined() || item[k].sizes() != first.sizes() || item[k].scalar_type() != first.scalar_type()) {
          fail(fmt::format("its tensor {} is {}, and that of item {} {}; get() must make them equal", k,
                           described(item[k]), job.indices[0], described(first)));
        }
        columns[k].push_back(std::move(item[k]));
      }
    }
    std::vector<at::Tensor> batch;
    for (const auto& column : columns) {
      at::Tensor items = at::stack(column);
      if (job.is_empty) {
        items = items.narrow(0, 0, 0).clone();
      }
      batch.push_back(options_.pin_memory ? items.pin_memory() : items);
    }
    return batch;
  }

  const LoaderOptions options_;
  const ItemSource source_;
  Sampler order_;
  Position here_;  // of the next batch; only the consumer uses here_

  std::mutex mutex_;
  std::condition_variable changed_;
  Position planned_;  // the end of the last job
  std::deque<std::shared_ptr<Job>> jobs_;
  int making_ = 0;  // workers that make a batch now, batches that nobody waits for included
  bool is_over_ = false;
  std::vector<std::thread> workers_;
};

Loader::Loader(ItemSource source, LoaderOptions options)
    : impl_(std::make_unique<Impl>(std::move(source), std::move(options))) {}
Loader::~Loader() = default;

std::optional<std::vector<at::Tensor>> Loader::next() { return impl_->next(); }
void Loader::wait() { impl_->wait(); }
int64_t Loader::epoch() const { return impl_->here().epoch; }
int64_t Loader::batches() const { return impl_->batches(); }
StateDict Loader::state_dict() const { return impl_->state_dict(); }
void Loader::load_state_dict(const StateDict& state) { impl_->load_state_dict(state); }

}  // namespace snug
