#include "src/remat/tape_recorder.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <torch/csrc/autograd/function.h>

#include "src/memory/aside.h"
#include "src/planner/profile.h"

// How a recording becomes a profile
//
// Problem: a profile must show the memory that the step takes by itself, whatever the tape keeps and rebuilds during
// the recording. The tape reports operators and storages by number; the allocator reports memory by address.
//
// Choice: the recorder listens to both, and sorts all memory into four accounts:
//
//   own_       memory of the step in no storage of the tape: gradients, workspace
//   of_tape_   storages of the tape, and memory that a replay took
//   aside_     memory that the recording itself took
//   the rest   memory from before the recording; releases are counted in let_go_
//
// Only own_ moves the level. Outputs of an operator move from own_ to of_tape_ when the operator is over. The rest of
// the operator's peak is the workspace. Between two events, one Allocate and one Release stand for all changes of the
// level.
//
// Consequences:
// - Storages live and die by the events Forward, Drop, Unpack and Done, so a simulation can predict any plan.
// - The drop of a storage that backward never asks for is moved to the moment when autograd releases the storage,
//   because autograd holds the storage in plain training too.

namespace snug::detail {
namespace {

// In some spans more happens than in a step: the plan of the recording writes a storage to a file, or another process
// has the processor. So a span counts at most a few times the median, or a millisecond if that is more.
double time_of_host(std::vector<double> spans) {
  constexpr double kMostOfMedian = 4, kAlwaysCounts = 1e-3;
  if (spans.empty()) {
    return 0;
  }
  const auto middle = spans.begin() + std::ssize(spans) / 2;
  std::ranges::nth_element(spans, middle);
  const double most = std::max(kAlwaysCounts, kMostOfMedian * *middle);
  return std::accumulate(spans.begin(), spans.end(), 0.0,
                         [&](double sum, double span) { return sum + std::min(span, most); });
}

}  // namespace

TapeRecorder::TapeRecorder(c10::Device device) : device_(device), clock_(device) {
  observation_.emplace(static_cast<MemoryObserver&>(*this), device);
}

TapeRecorder::~TapeRecorder() = default;

// Work of the recorder, on whichever thread. The forward pass and the backward pass may have threads of their own, but
// one waits for the other.
class TapeRecorder::Recording {
 public:
  explicit Recording(TapeRecorder& recorder)
      : lock_(recorder.mutex_), clock_(recorder.clock_), before_(clock_.switch_to(OperatorClock::Worker::Recorder)) {}
  ~Recording() { clock_.switch_to(before_); }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

 private:
  const std::lock_guard<std::mutex> lock_;
  OperatorClock& clock_;
  const OperatorClock::Worker before_;
};

// --- events of the tape

void TapeRecorder::on_storage(int, int64_t bytes, bool is_external) {
  const Recording recording(*this);
  profile_.storages.push_back(
      {.bytes = bytes, .kind = is_external ? plan::StorageKind::External : plan::StorageKind::Activation});
}

void TapeRecorder::before_operator() {
  const Recording recording(*this);
  end_gap();
  place_ = Place::Operator;
  operator_began_ = clock_.begin();
}

void TapeRecorder::after_operator(plan::Operator&& op, const std::vector<std::pair<int, const void*>>& made) {
  const Recording recording(*this);
  const bool is_operator = op.name != plan::kOtherWrite;
  operator_spans_.push_back({operator_began_, clock_.mark()});
  if (is_operator && gap_began_) {
    gaps_.push_back({*gap_began_, operator_began_});
  }
  gap_began_ = is_operator ? operator_spans_.back().second : gap_began_;
  int64_t outputs = 0;
  for (const auto& [storage, data] : made) {
    const auto taken = own_.find(data);
    const int64_t bytes = taken == own_.end() ? 0 : taken->second.bytes;
    plan::Storage& info = profile_.storages[static_cast<size_t>(storage)];
    info.bytes = bytes;
    info.name = op.name;
    outputs += bytes;
    if (taken != own_.end()) {
      own_.erase(taken);
      of_tape_.insert(data);
    }
  }
  // Bytes that stay beside the outputs become a separate event.
  const int64_t left = level_ - outputs;
  op.workspace = std::max<int64_t>(0, high_ - outputs);
  profile_.operators.push_back(std::move(op));
  add(plan::EventKind::Forward, static_cast<int>(profile_.operators.size()) - 1);
  level_ = left;
  high_ = std::max<int64_t>(0, left);
  end_gap();
  place_ = Place::Between;
}

void TapeRecorder::after_view() {
  const Recording recording(*this);
  end_gap();
  place_ = Place::Between;
}

void TapeRecorder::on_drop(int storage) {
  const Recording recording(*this);
  end_gap();
  add(plan::EventKind::Drop, storage);
}

void TapeRecorder::on_unpack(int storage) {
  const Recording recording(*this);
  end_backward_step();
  end_gap();
  add(plan::EventKind::Unpack, storage);
  const auto node = torch::autograd::get_current_node();
  step_name_ = node ? node->name() : "backward";
}

void TapeRecorder::after_unpack() {
  const Recording recording(*this);
  step_began_ = clock_.begin();
}

void TapeRecorder::tape_works() {
  const std::lock_guard lock(mutex_);
  if (tapes_at_work_++ == 0) {
    clock_.switch_to(OperatorClock::Worker::Tape);
  }
}

void TapeRecorder::tape_rests() {
  const std::lock_guard lock(mutex_);
  if (--tapes_at_work_ == 0) {
    clock_.switch_to(OperatorClock::Worker::Program);
  }
}

void TapeRecorder::before_replay() {
  const std::lock_guard lock(mutex_);
  place_ = Place::Replay;
  gap_began_.reset();
  worker_before_replay_ = clock_.switch_to(OperatorClock::Worker::Recorder);  // the simulator counts replays
}

void TapeRecorder::after_replay() {
  const std::lock_guard lock(mutex_);
  place_ = Place::Between;
  clock_.switch_to(worker_before_replay_);
}

void TapeRecorder::on_done(int storage) {
  const Recording recording(*this);
  end_gap();
  add(plan::EventKind::Done, storage);
  unused_since_[storage] = profile_.events.size();
}

// From here on, the memory belongs to the backward pass, as a copy would.
void TapeRecorder::on_given_away(int storage, const void* data) {
  const Recording recording(*this);
  if (of_tape_.erase(data) > 0) {
    const int64_t bytes = profile_.storages[static_cast<size_t>(storage)].bytes;
    own_.emplace(data, Own{bytes, step()});
    change_level(bytes);
  }
}

void TapeRecorder::on_unused(int storage) {
  const Recording recording(*this);
  end_gap();
  unused_since_[storage] = profile_.events.size();
}

// Moves the drops of storages that autograd saves and the backward pass never asks for, or that a pass inside asks for.
// The storages are kept as in plain training: until autograd releases the storages.
void TapeRecorder::move_drops_of_unused() {
  std::vector<bool> asked_for = profile_.saved_storages();
  for (const int storage : asked_inside_) {
    asked_for[static_cast<size_t>(storage)] = false;
  }
  std::vector<plan::Event> events;
  std::unordered_map<size_t, std::vector<int>> moved;
  for (const auto& [storage, event] : unused_since_) {
    if (!asked_for[static_cast<size_t>(storage)]) {
      moved[event].push_back(storage);
    }
  }
  const auto is_moved = [&](size_t e) {
    const plan::Event& event = profile_.events[e];
    const auto found = event.kind == plan::EventKind::Drop ? unused_since_.find(event.index) : unused_since_.end();
    return found != unused_since_.end() && found->second > e && !asked_for[static_cast<size_t>(event.index)];
  };
  const auto is_of_inside = [&](const plan::Event& event) {
    return (event.kind == plan::EventKind::Unpack || event.kind == plan::EventKind::Done) &&
           asked_inside_.contains(event.index);
  };
  std::unordered_set<int> dropped_before;
  for (size_t e = 0; e <= profile_.events.size(); ++e) {
    for (const int storage : moved[e]) {
      if (dropped_before.contains(storage)) {
        events.push_back({plan::EventKind::Drop, storage, 0});
      }
    }
    if (e == profile_.events.size()) {
      break;
    }
    if (is_moved(e)) {
      dropped_before.insert(profile_.events[e].index);
    } else if (!is_of_inside(profile_.events[e])) {
      events.push_back(profile_.events[e]);
    }
  }
  profile_.events = std::move(events);
}

// --- memory

void TapeRecorder::on_allocate(c10::Device device, const void* data, int64_t bytes) noexcept {
  if (device != device_) {
    return;
  }
  const Recording recording(*this);
  if (Aside::is_now()) {
    aside_.insert(data);
    return;
  }
  change_rise(bytes);
  if (place_ == Place::Replay) {
    of_tape_.insert(data);
    return;
  }
  own_.emplace(data, Own{bytes, step()});
  change_level(bytes);
}

// Memory from before the recording does not lower the level.
void TapeRecorder::on_free(c10::Device device, const void* data, int64_t bytes) noexcept {
  if (device != device_) {
    return;
  }
  const Recording recording(*this);
  if (of_tape_.erase(data) > 0) {
    change_rise(-bytes);
  } else if (own_.erase(data) > 0) {
    change_rise(-bytes);
    change_level(-bytes);
  } else if (aside_.erase(data) == 0) {
    let_go_ += bytes;
    let_go_in_gap_ += bytes;
  }
}

void TapeRecorder::on_refused(int64_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  if (is_backward_ && !Aside::is_now()) {
    refused_ = {profile_.events.size(), std::max(high_, level_ + bytes), rise_ + bytes};
  }
}

std::optional<TapeRecorder::Unfinished> TapeRecorder::take_unfinished() {
  observation_.reset();
  if (!refused_) {
    return std::nullopt;
  }
  fill_in_times();
  profile_.events.resize(refused_->events);
  add(plan::EventKind::Allocate, 0, refused_->high);
  add(plan::EventKind::Release, 0, refused_->high);
  // Storages that the graph released when the error ended the graph are not unused. Storages that a pass inside asks
  // for stay to the end.
  std::erase_if(unused_since_, [&](const auto& one) { return one.second > refused_->events; });
  for (const int storage : asked_inside_) {
    unused_since_.try_emplace(storage, profile_.events.size());
  }
  move_drops_of_unused();
  return Unfinished{take(), refused_->rise};
}

void TapeRecorder::change_rise(int64_t bytes) {
  rise_ += bytes;
  peak_ = std::max(peak_, rise_);
}

void TapeRecorder::change_level(int64_t bytes) {
  level_ += bytes;
  high_ = std::max(high_, level_);
}

// Between two events, only the highest level and the last level matter.
void TapeRecorder::end_gap() {
  if (high_ > 0) {
    add(plan::EventKind::Allocate, 0, high_);
  }
  if (high_ > level_) {
    add(plan::EventKind::Release, 0, high_ - level_);
  }
  level_ = high_ = 0;
  if (const int64_t bytes = std::exchange(let_go_in_gap_, 0); bytes > 0) {
    add(plan::EventKind::Release, kFromBefore, bytes);
  }
}

// --- backward

void TapeRecorder::begin_backward() {
  const Recording recording(*this);
  is_backward_ = true;
  step_name_ = "backward";
  step_began_ = clock_.begin();
}

void TapeRecorder::end_backward_step() {
  if (!is_backward_) {
    return;
  }
  end_gap();
  profile_.backward.push_back({.name = step_name_});
  backward_spans_.push_back({step_began_, clock_.mark()});
  add(plan::EventKind::Backward, static_cast<int>(profile_.backward.size()) - 1);
}

void TapeRecorder::stop() {
  observation_.reset();
  end_backward_step();
  end_gap();
  for (const auto& [data, own] : own_) {
    if (own.step != kForward) {
      profile_.backward[own.step].gradient_bytes += own.bytes;
    }
  }
  fill_in_times();
  move_drops_of_unused();
}

void TapeRecorder::fill_in_times() {
  std::vector<OperatorClock::Span> spans = operator_spans_;
  spans.insert(spans.end(), backward_spans_.begin(), backward_spans_.end());
  const std::vector<double> times = clock_.finish(spans);
  auto seconds = times.begin();
  for (plan::Operator& op : profile_.operators) {
    op.seconds = op.name == plan::kOtherWrite ? 0 : *seconds;  // plan::kOtherWrite is not an operator
    ++seconds;
  }
  for (auto& step : profile_.backward) {
    step.seconds = *seconds++;
  }
  profile_.host_seconds = time_of_host(clock_.of_host(gaps_));
  if (!device_.is_cpu()) {  // the host calls operators while the device works
    profile_.host_seconds +=
        time_of_host(clock_.of_host(operator_spans_)) + time_of_host(clock_.of_host(backward_spans_));
  }
  profile_.tape_seconds = clock_.of_tape();
}

}  // namespace snug::detail
