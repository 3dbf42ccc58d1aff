#pragma once
// The implementation of ProcessGroup. c10d's Reducer needs a c10d::ProcessGroup: a table of backends by device.

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "snug/core.h"
#include "snug/distributed/process_group.h"
#include "snug/state.h"
#include "src/distributed/heartbeat.h"
#include "src/memory/operator_mode.h"

namespace snug {
namespace detail {

class KeptOnRanks;

/// Whether a broadcast can send `tensor`: the tensor has memory with strides, and a type whose elements are bytes.
bool can_be_sent(const at::Tensor& tensor);

/// The tensor's memory in the form that a broadcast sends. Gloo supports few types, and a broadcast copies bytes: so
/// the result is a view as a type of the same width that Gloo supports. The result has a single entry of an expanded
/// dimension.
at::Tensor as_sent(const at::Tensor& tensor);

/// All-reduces numbers of the host, in place. Allocates nothing. No policy of operators sees the call. When the call
/// returns, the memory of `numbers` belongs to the caller again, although a thread of Gloo may keep the tensor on the
/// memory.
void all_reduce(ProcessGroup& group, std::span<int64_t> numbers, ReduceOp op = ReduceOp::Sum);

/// All ranks call it with the exception that this rank has caught, or null. Rethrows the exception. Returns another
/// rank that has one. Works without memory.
std::optional<int> failed_rank(ProcessGroup& group, const std::exception_ptr& failure);

/// Start to send to, or to receive from, one rank: c10d's operations with tags. The calling thread takes no SIGPIPE
/// from a rank that has just died.
c10::intrusive_ptr<c10d::Work> start_send(c10d::Backend& backend, const at::Tensor& tensor, int to, int tag);
c10::intrusive_ptr<c10d::Work> start_receive(c10d::Backend& backend, const at::Tensor& tensor, int from, int tag);

/// The time, in seconds, during which at least one of several operations was running. The methods may be called from
/// several threads.
class BusyTime {
 public:
  void begin() {
    const std::lock_guard lock(mutex_);
    if (running_++ == 0) {
      since_ = std::chrono::steady_clock::now();
    }
  }
  void end() {
    const std::lock_guard lock(mutex_);
    if (--running_ == 0) {
      total_ += std::chrono::steady_clock::now() - since_;
    }
  }
  /// From here on the time is NaN, because nobody hears of the end of an operation.
  void lose() {
    const std::lock_guard lock(mutex_);
    total_ = std::chrono::duration<double>(std::numeric_limits<double>::quiet_NaN());
  }
  double seconds() const {
    const std::lock_guard lock(mutex_);
    return total_.count();
  }

 private:
  mutable std::mutex mutex_;
  int running_ = 0;
  std::chrono::steady_clock::time_point since_;
  std::chrono::duration<double> total_{};
};

}  // namespace detail

class ProcessGroup::Impl {
 public:
  /// The most bytes of small tensors that travel together in a broadcast. The tensors travel in a copy; two copies
  /// exist at a time.
  static constexpr int64_t kBroadcastChunk = 250 << 20;

  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::Backend> backend;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  /// The devices, besides the CPU, that the group may connect.
  c10::DeviceType accelerator = c10::kCUDA;
  /// Makes the backend of the accelerator's tensors, or returns null without NCCL or such devices. The backend is made
  /// for the first tensor on the accelerator.
  std::function<c10::intrusive_ptr<c10d::Backend>()> make_device_backend;
  /// Makes a group of `ranks` consecutive ranks, of which this rank is one, with a Gloo backend of its own: its
  /// messages meet no others. `ranks` divides the size. All ranks must call it.
  std::function<std::shared_ptr<ProcessGroup>(int ranks)> make_group;
  std::shared_ptr<detail::Heartbeat> heartbeat;  // of all ranks; null if there is one
  std::string who;                               // for messages: "rank 1 of 4", of all ranks
  int local_rank = 0;
  Traffic traffic = {};
  /// The time in which started all-reduces were running.
  std::shared_ptr<detail::BusyTime> busy = std::make_shared<detail::BusyTime>();

  /// Tensors in parts on the ranks, for a save.
  std::vector<detail::KeptOnRanks*> kept = {};

  /// Above 0: this rank runs passes that belong to no step, without the other ranks. Above 0 nothing is sent, and each
  /// operation returns this rank's own values as the values of all ranks.
  std::atomic<int> rehearsals = 0;

  ~Impl();

  bool connects(c10::Device device) { return device.is_cpu() || (device.type() == accelerator && device_backend()); }
  c10d::Backend& backend_of(const at::Tensor& tensor) {
    return connects(tensor.device()) && !tensor.is_cpu() ? *device_backend() : *backend;
  }

  /// Calls `part` of an operation that all ranks make together; see named().
  template <class F>
  auto attempt(std::string_view operation, F&& part) const {
    if (heartbeat) {
      heartbeat->begin_operation();
    }
    return named(operation, std::forward<F>(part));
  }

  /// Calls `part` of an operation. The operators of `part` are not part of the model. An exception of c10d becomes a
  /// DistributedError that names the lost ranks.
  template <class F>
  auto named(std::string_view operation, F&& part) const {
    const detail::UnseenOperators unseen;
    try {
      return std::forward<F>(part)();
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      if (is_out_of_memory(error)) {
        throw;
      }
      fail(operation, error);
    }
  }

 private:
  const c10::intrusive_ptr<c10d::Backend>& device_backend();
  [[noreturn]] void fail(std::string_view operation, const std::exception& error) const;

  std::once_flag asked_for_device_;
  c10::intrusive_ptr<c10d::Backend> device_backend_;
};

}  // namespace snug
