#pragma once
// TapeRecorder: makes a plan::Profile of one forward and backward pass whose operators an OpTape sees. The profile has
// the times, and every byte taken and given back, in order among the events. tape_recorder.cpp says how.

#include <atomic>
#include <cstdint>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "src/memory/device_memory.h"
#include "src/planner/profile.h"
#include "src/remat/op_tape.h"
#include "src/remat/operator_clock.h"

namespace snug::detail {

/// Records the memory and the time of one device. The recorded step runs on one thread. Listens from the construction
/// on.
class TapeRecorder final : public TapeListener, private MemoryObserver {
 public:
  /// `device` has an index, unless the device is the CPU.
  explicit TapeRecorder(c10::Device device);
  ~TapeRecorder() override;
  TapeRecorder(const TapeRecorder&) = delete;
  TapeRecorder& operator=(const TapeRecorder&) = delete;

  c10::Device device() const { return device_; }
  /// The forward pass is over.
  void begin_backward();
  /// The backward pass is over: nothing is recorded any more.
  void stop();
  /// How far memory rose since the recording began, replays included. The number is measured; the profile's simulation
  /// predicts the number. The recording's own memory is left out.
  int64_t peak_bytes() const { return peak_; }
  /// The recorded profile, after stop().
  plan::Profile take() { return std::move(profile_); }
  /// The tensors that autograd saved in the forward pass: each entry is a storage, and the number of operators before
  /// the save.
  const std::vector<std::pair<int, size_t>>& packed() const { return packed_; }
  /// The facts recorded although the backward pass ran out of memory: events until the failure, with the refused bytes,
  /// and how far memory would have risen. Empty: no memory was refused in the backward pass.
  struct Unfinished {
    plan::Profile profile;
    int64_t demand_bytes;
  };
  std::optional<Unfinished> take_unfinished();
  /// Bytes that were alive when the recording began and were released in the recording. Release events of memory
  /// `kFromBefore` say when. The events stay in the profile until profile_step.cpp takes the events out or counts the
  /// bytes in.
  int64_t let_go_bytes() const { return let_go_; }
  static constexpr int kFromBefore = 1;

 private:
  enum class Place { Between, Operator, Replay };
  class Recording;

  void on_storage(int storage, int64_t bytes, bool is_external) override;
  void before_operator() override;
  void after_operator(plan::Operator&& op, const std::vector<std::pair<int, const void*>>& made) override;
  void after_view() override;
  void on_drop(int storage) override;
  void on_resized(int storage) override {
    profile_.storages[static_cast<size_t>(storage)].kind = plan::StorageKind::Pinned;
  }
  void on_unpack(int storage) override;
  void after_unpack() override;
  void on_done(int storage) override;
  void on_given_away(int storage, const void* data) override;
  void on_pack(int storage) override { packed_.push_back({storage, profile_.operators.size()}); }
  void on_unused(int storage) override;
  void on_asked_inside(int storage) override { asked_inside_.insert(storage); }
  void tape_works() override;
  void tape_rests() override;
  void before_replay() override;
  void after_replay() override;

  void on_allocate(c10::Device device, const void* data, int64_t bytes) noexcept override;
  void on_free(c10::Device device, const void* data, int64_t bytes) noexcept override;
  void on_refused(int64_t bytes) noexcept override;
  void on_saved_for_backward(const void*) noexcept override {}

  static constexpr size_t kForward = std::numeric_limits<size_t>::max();
  size_t step() const { return is_backward_ ? profile_.backward.size() : kForward; }
  void add(plan::EventKind kind, int index, int64_t bytes = 0) { profile_.events.push_back({kind, index, bytes}); }
  void change_rise(int64_t bytes);
  void change_level(int64_t bytes);
  void end_gap();
  void end_backward_step();
  void fill_in_times();
  void move_drops_of_unused();

  c10::Device device_;
  plan::Profile profile_;
  OperatorClock clock_;
  int tapes_at_work_ = 0;  // the work of the tape may be nested
  OperatorClock::Worker worker_before_replay_ = OperatorClock::Worker::Program;
  std::vector<OperatorClock::Span> operator_spans_, backward_spans_;  // of the profile's operators and backward steps
  std::vector<OperatorClock::Span> gaps_;  // between operators of the forward pass, without replays
  std::atomic<Place> place_{Place::Between};
  int64_t level_ = 0, high_ = 0;  // since the last event, or of the operator under way
  struct Own {
    int64_t bytes;
    size_t step;  // the backward step in which the memory was allocated; kForward: before the backward pass
  };
  std::unordered_map<const void*, Own> own_;  // memory allocated since the start, in no storage of the tape
  std::unordered_set<const void*> of_tape_;   // storages of the tape, and memory taken by a replay
  std::unordered_set<const void*> aside_;     // memory taken by the recording itself
  int64_t rise_ = 0, peak_ = 0;               // of all memory but aside_
  int64_t let_go_ = 0, let_go_in_gap_ = 0;    // of memory from before; since the last event
  // Threads of an operator allocate too. Locked after the allocator's mutex, so nothing is allocated under the lock.
  std::mutex mutex_;
  OperatorClock::Mark operator_began_ = 0, step_began_ = 0;
  std::optional<OperatorClock::Mark> gap_began_;
  std::string step_name_;
  bool is_backward_ = false;
  // The state when memory was last refused in backward.
  struct Refused {
    size_t events;
    int64_t high, rise;
  };
  std::optional<Refused> refused_;
  std::unordered_map<int, size_t> unused_since_;  // the event before which the last unused tensor was released
  std::unordered_set<int> asked_inside_;
  std::vector<std::pair<int, size_t>> packed_;
  std::optional<MemoryObservation> observation_;
};

}  // namespace snug::detail
