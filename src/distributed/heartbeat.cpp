#include "src/distributed/heartbeat.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace snug::detail {
namespace {

constexpr auto kBeat = std::chrono::milliseconds(500);
constexpr size_t kBeatsToWait = 5;
constexpr auto kAnswer = (kBeatsToWait + 3) * kBeat;
constexpr auto kFarewell = std::chrono::seconds(2);
constexpr const char* kLost = "snug/lost";
constexpr const char* kLeft = "snug/left";

std::string beats_of(int rank) { return fmt::format("snug/beats/{}", rank); }
std::string operations_of(int rank) { return fmt::format("snug/operations/{}", rank); }

}  // namespace

// A store that cannot be reached any more may keep a caller waiting for ever. So a separate thread does all work with
// the store, and is left behind if the thread does not return.
class Heartbeat::State {
 public:
  State(c10::intrusive_ptr<c10d::Store> store, int rank, int size, bool serves_store)
      : store_(std::move(store)), rank_(rank), size_(size), serves_store_(serves_store) {}

  void run() {
    try {
      beat();
      say_farewell();
    } catch (const std::exception&) {
      // The store is gone.
    }
    const std::lock_guard lock(mutex_);
    is_done_ = true;
    changed_.notify_all();
  }

  void end() {
    std::unique_lock lock(mutex_);
    is_over_ = true;
    changed_.notify_all();
    changed_.wait_for(lock, kFarewell + kBeat, [this] { return is_done_; });
  }

  void begin_operation() { ++operations_; }

  Missing missing_ranks(int number, int size) {
    std::unique_lock lock(mutex_);
    first_ = rank_ - number;
    end_ = first_ + size;
    has_looked_ = false;
    is_asked_ = true;
    changed_.notify_all();
    const bool answers = changed_.wait_for(lock, kAnswer, [this] { return has_looked_ || is_done_; });
    // Rank 0, or the launcher that started rank 0, serves the store.
    const bool has_lost_store = lost_.empty() && (!answers || is_done_) && !serves_store_;
    return {.lost = has_lost_store ? "0" : lost_, .behind = behind_};
  }

 private:
  void beat() {
    std::vector<std::vector<int64_t>> seen;  // beats of all ranks since missing_ranks() was called
    int64_t told = 0;                        // number of operations that the store has
    std::unique_lock lock(mutex_);
    while (!is_over_) {
      const bool is_asked = is_asked_;
      lock.unlock();
      store_->add(beats_of(rank_), 1);
      const int64_t begun = operations_;
      store_->add(operations_of(rank_), begun - std::exchange(told, begun));
      std::string lost = store_->check({kLost}) ? store_->get_to_str(kLost) : "";
      if (is_asked && lost.empty()) {
        seen.push_back(read(beats_of));
        lost = seen.size() > kBeatsToWait ? find_lost(seen.front(), seen.back()) : "";
      }
      const bool is_known = !lost.empty() || seen.size() > kBeatsToWait;
      const std::string behind = is_asked && is_known ? find_behind(begun) : "";
      lock.lock();
      lost_ = lost.empty() ? lost_ : lost;
      if (is_asked && is_known) {
        behind_ = behind;
        has_looked_ = true;
        is_asked_ = false;
        seen.clear();
        changed_.notify_all();
      }
      changed_.wait_for(lock, kBeat, [this] { return is_over_; });
    }
  }

  std::vector<int64_t> read(std::string (*key_of)(int rank)) {
    std::vector<int64_t> numbers;
    for (int rank = 0; rank < size_; ++rank) {
      numbers.push_back(store_->add(key_of(rank), 0));
    }
    return numbers;
  }

  std::string find_behind(int64_t begun) {
    const std::vector<int64_t> operations = read(operations_of);
    std::vector<int> behind;
    for (int rank = first_; rank < end_; ++rank) {
      if (operations[static_cast<size_t>(rank)] < begun) {
        behind.push_back(rank);
      }
    }
    return fmt::format("{}", fmt::join(behind, ", "));
  }

  // The first rank to find the lost ranks tells all other ranks, because the first rank may be gone soon.
  std::string find_lost(const std::vector<int64_t>& before, const std::vector<int64_t>& after) {
    std::vector<int> lost;
    for (int rank = 0; rank < size_; ++rank) {
      if (before[static_cast<size_t>(rank)] == after[static_cast<size_t>(rank)]) {
        lost.push_back(rank);
      }
    }
    return lost.empty() ? "" : store_->compareSet(kLost, std::string(), fmt::format("{}", fmt::join(lost, ", ")));
  }

  void say_farewell() {
    const auto deadline = std::chrono::steady_clock::now() + (lost_.empty() ? kFarewell : 2 * kBeat);
    store_->add(kLeft, 1);
    while (serves_store_ && store_->add(kLeft, 0) < size_ && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int size_;
  const bool serves_store_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_over_ = false;
  bool is_done_ = false;
  bool is_asked_ = false;
  bool has_looked_ = false;
  std::string lost_, behind_;
  std::atomic<int> first_ = 0, end_ = 0;  // of missing_ranks()
  std::atomic<int64_t> operations_ = 0;
};

Heartbeat::Heartbeat(c10::intrusive_ptr<c10d::Store> store, int rank, int size, bool serves_store)
    : state_(std::make_shared<State>(std::move(store), rank, size, serves_store)) {
  std::thread([state = state_] { state->run(); }).detach();
}

Heartbeat::~Heartbeat() { state_->end(); }
void Heartbeat::begin_operation() { state_->begin_operation(); }
Heartbeat::Missing Heartbeat::missing_ranks(int number, int size) { return state_->missing_ranks(number, size); }

}  // namespace snug::detail
