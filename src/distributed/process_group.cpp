#include "snug/distributed/process_group.h"

#include <algorithm>
#include <csignal>
#include <ctime>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_as_real.h>
#include <fmt/format.h>
#include <pthread.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "snug/core.h"
#include "src/core/first_line.h"
#include "src/distributed/gloo_backend.h"
#include "src/distributed/launch_environment.h"
#include "src/distributed/nccl_backend.h"
#include "src/distributed/process_group_impl.h"
#include "src/distributed/rendezvous.h"
#include "src/memory/operator_mode.h"

namespace snug {

bool detail::can_be_sent(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_quantized();
}

at::Tensor detail::as_sent(const at::Tensor& tensor) {
  at::Tensor sent = tensor.detach();
  for (int64_t dim = 0; dim < sent.dim(); ++dim) {
    if (sent.stride(dim) == 0 && sent.size(dim) > 1) {
      sent = sent.narrow(dim, 0, 1);
    }
  }
  switch (sent.element_size()) {
    case 1:
      return sent.view(at::kByte);
    case 2:
      return sent.view(at::kHalf);
    case 4:
      return sent.view(at::kInt);
    case 8:
      return sent.view(at::kLong);
    default:
      return at::view_as_real(sent);  // the widest type is a pair of doubles
  }
}

void detail::all_reduce(ProcessGroup& group, std::span<int64_t> numbers, ReduceOp op) {
  const UnseenOperators unseen;
  group.all_reduce(at::from_blob(numbers.data(), {static_cast<int64_t>(numbers.size())}, at::kLong), op);
}

std::optional<int> detail::failed_rank(ProcessGroup& group, const std::exception_ptr& failure) {
  int64_t failed = failure ? group.rank() : -1;
  all_reduce(group, {&failed, 1}, ReduceOp::Max);
  if (failure) {
    std::rethrow_exception(failure);
  }
  return failed >= 0 ? std::optional(static_cast<int>(failed)) : std::nullopt;
}

namespace {

// Threads started in the scope do not take SIGPIPE. Gloo writes to sockets by writev(), which has no MSG_NOSIGNAL, so a
// write to a rank that has just died ends the process before any code can name the dead rank. With the signal blocked
// the write fails with EPIPE, which Gloo handles. Python ignores the signal for the whole process; a library leaves the
// choice to the program.
class [[nodiscard]] SigpipeBlocked final {
 public:
  SigpipeBlocked() {
    ::sigset_t pending;
    ::sigpending(&pending);
    was_pending_ = ::sigismember(&pending, SIGPIPE) == 1;
    ::pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  /// Consumes a signal that a write of this thread has raised during the scope.
  ~SigpipeBlocked() {
    const timespec at_once = {};
    if (!was_pending_) {
      ::sigtimedwait(&sigpipe_, nullptr, &at_once);
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  SigpipeBlocked(const SigpipeBlocked&) = delete;
  SigpipeBlocked& operator=(const SigpipeBlocked&) = delete;

 private:
  static ::sigset_t only_sigpipe() {
    ::sigset_t set;
    ::sigemptyset(&set);
    ::sigaddset(&set, SIGPIPE);
    return set;
  }

  ::sigset_t sigpipe_ = only_sigpipe();
  ::sigset_t before_{};
  bool was_pending_ = false;
};

}  // namespace

c10::intrusive_ptr<c10d::Work> detail::start_send(c10d::Backend& backend, const at::Tensor& tensor, int to, int tag) {
  const SigpipeBlocked in_this_thread;
  std::vector<at::Tensor> tensors = {tensor};
  return backend.send(tensors, to, tag);
}

c10::intrusive_ptr<c10d::Work> detail::start_receive(c10d::Backend& backend, const at::Tensor& tensor, int from,
                                                     int tag) {
  const SigpipeBlocked in_this_thread;
  std::vector<at::Tensor> tensors = {tensor};
  return backend.recv(tensors, from, tag);
}

namespace {

c10d::ReduceOp::RedOpType c10d_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::Max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::Min:
      return c10d::ReduceOp::MIN;
    case ReduceOp::Sum:
      break;
  }
  return c10d::ReduceOp::SUM;
}

void check(const char* operation, const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_contiguous()) {
    throw ConfigError(fmt::format("ProcessGroup.{}: the tensor is {}; give a contiguous one", operation,
                                  tensor.defined() ? "not contiguous" : "undefined"));
  }
}

void read_store(const std::string& store, detail::Meeting& meeting) {
  constexpr std::string_view kTcp = "tcp://";
  constexpr std::string_view kFile = "file://";
  if (store.starts_with(kFile) && store.size() > kFile.size()) {
    meeting.file = store.substr(kFile.size());
    return;
  }
  const size_t colon = store.rfind(':');
  if (store.starts_with(kTcp) && colon > kTcp.size()) {
    meeting.place.host = store.substr(kTcp.size(), colon - kTcp.size());
    const std::string port = store.substr(colon + 1);
    const bool is_number =
        !port.empty() && port.size() < 6 && port.find_first_not_of("0123456789") == std::string::npos;
    if (is_number && std::stoi(port) >= 1 && std::stoi(port) <= 65535) {
      meeting.place.port = static_cast<uint16_t>(std::stoi(port));
      meeting.place.launcher_serves_store = false;
      return;
    }
  }
  throw ConfigError(
      fmt::format("init_process_group: the store is '{}'; give \"tcp://HOST:PORT\" or \"file:///PATH\"", store));
}

// An option, or a variable if the option is empty.
std::string option_or_variable(const std::string& option, const detail::Environment& environment,
                               const std::string& variable) {
  const auto found = environment.find(variable);
  return option.empty() && found != environment.end() ? found->second : option;
}

detail::Meeting find_meeting(const ProcessGroupOptions& options, const detail::Environment& environment) {
  detail::Meeting meeting{.token = option_or_variable(options.token, environment, "SNUG_JOB_TOKEN"),
                          .timeout = options.timeout};
  if (options.rank.has_value() != options.size.has_value()) {
    throw ConfigError("init_process_group: of rank and size only one is given; give both or neither");
  }
  if (options.timeout.count() <= 0) {
    throw ConfigError(
        fmt::format("init_process_group: the timeout is {} ms; give one above 0", options.timeout.count()));
  }
  if (options.rank) {
    const int rank = *options.rank;
    const int size = *options.size;
    if (size < 1 || rank < 0 || rank >= size) {
      throw ConfigError(fmt::format(
          "init_process_group: rank is {} and size is {}; ranks are counted from 0 to size - 1", rank, size));
    }
    meeting.place.rank = meeting.place.local_rank = rank;
    meeting.place.size = size;
    meeting.place.launcher = "the options";
  } else {
    meeting.place = detail::read_launch_environment(environment);
  }
  if (!options.store.empty()) {
    read_store(options.store, meeting);
  }
  if (meeting.place.size > 1 && meeting.file.empty() && (meeting.place.host.empty() || meeting.place.port == 0)) {
    throw ConfigError(fmt::format(
        "init_process_group: rank {} of {} (from {}) does not know where to meet the others; set MASTER_ADDR to "
        "the host of rank 0 and MASTER_PORT to a free port, or give a store",
        meeting.place.rank, meeting.place.size, meeting.place.launcher));
  }
  return meeting;
}

// Connects the ranks that meet in impl.store, by all backends.
void connect(ProcessGroup::Impl& impl, const detail::LaunchPlace& place, bool is_local,
             const ProcessGroupOptions& options) {
  const SigpipeBlocked in_new_threads;
  impl.local_rank = place.local_rank;
  impl.backend =
      detail::make_gloo_backend(impl.store, place.rank, place.size, options.timeout, options.interface, is_local);
  impl.group = c10::make_intrusive<c10d::ProcessGroup>(impl.store, place.rank, place.size);
  impl.group->setBackend(c10::kCPU, c10d::ProcessGroup::GLOO, impl.backend);
  impl.group->setDefaultBackend(c10d::ProcessGroup::GLOO);
  impl.make_group = [&impl, place, is_local, options, made = 0](int ranks) mutable {
    detail::LaunchPlace in_group = place;
    in_group.rank %= ranks;
    in_group.size = ranks;
    auto group = std::make_unique<ProcessGroup::Impl>();
    group->store = c10::make_intrusive<c10d::PrefixStore>(fmt::format("group {} {}/", made++, place.rank / ranks),
                                                          impl.store->clone());
    group->heartbeat = impl.heartbeat;
    group->who = impl.who;
    connect(*group, in_group, is_local, options);
    return std::make_shared<ProcessGroup>(std::move(group));
  };
  // NCCL waits in its store and keeps the store's lock while waiting, so the heartbeat must have another store.
  impl.make_device_backend = [store = impl.store, rank = place.rank, size = place.size, timeout = options.timeout] {
    return detail::make_nccl_backend(store->clone(), rank, size, timeout);
  };
}

}  // namespace

void ProcessGroup::Impl::fail(std::string_view operation, const std::exception& error) const {
  const auto [lost, behind] =
      heartbeat ? heartbeat->missing_ranks(group->getRank(), group->getSize()) : detail::Heartbeat::Missing();
  throw DistributedError(fmt::format(
      "ProcessGroup.{}: failed on {}: {}; {}", operation, who, detail::first_line(error),
      !lost.empty() ? fmt::format("rank {} has died, hangs or cannot be reached: see what it wrote last", lost)
      : !behind.empty()
          ? fmt::format("rank {} is alive, and has not come to this call: it hangs before it, or leaves it out", behind)
          : "all ranks are alive: has one of them left out this call?"));
}

const c10::intrusive_ptr<c10d::Backend>& ProcessGroup::Impl::device_backend() {
  std::call_once(asked_for_device_, [&] {
    if ((device_backend_ = make_device_backend())) {
      group->setBackend(accelerator, c10d::ProcessGroup::NCCL, device_backend_);
    }
  });
  return device_backend_;
}

ProcessGroup::Impl::~Impl() {
  if (device_backend_) {
    try {
      device_backend_->shutdown();
    } catch (const std::exception&) {  // another rank is gone, and the connection is gone as well
    }
  }
}

ProcessGroup::ProcessGroup(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ProcessGroup::~ProcessGroup() = default;

int ProcessGroup::rank() const { return impl_->group->getRank(); }
int ProcessGroup::size() const { return impl_->group->getSize(); }
int ProcessGroup::local_rank() const { return impl_->local_rank; }
const ProcessGroup::Traffic& ProcessGroup::traffic() const { return impl_->traffic; }

void ProcessGroup::all_reduce(const at::Tensor& tensor, ReduceOp op) { start_all_reduce(tensor, op)(); }

std::function<void()> ProcessGroup::start_all_reduce(const at::Tensor& tensor, ReduceOp op) {
  check("all_reduce", tensor);
  detail::report_coming_write(tensor);
  if (impl_->rehearsals > 0) {
    detail::report_unseen_write(tensor);
    return [] {};
  }
  impl_->traffic.all_reduce += static_cast<int64_t>(tensor.nbytes());
  c10d::AllreduceOptions options;
  options.reduceOp = c10d_op(op);
  std::vector<at::Tensor> tensors = {tensor.detach()};
  auto work = impl_->attempt("all_reduce", [&] { return impl_->backend_of(tensor).allreduce(tensors, options); });
  if (tensor.is_cpu()) {
    impl_->busy->begin();
    work->getFuture()->addCallback([busy = impl_->busy](c10::ivalue::Future& /*work*/) { busy->end(); });
  } else {
    impl_->busy->lose();  // NCCL's future is complete when the work is queued
  }
  detail::report_unseen_write(tensor);
  return [impl = impl_.get(), work = std::move(work)] { impl->attempt("all_reduce", [&] { work->wait(); }); };
}

void ProcessGroup::broadcast(const std::vector<at::Tensor>& tensors, int root) {
  if (tensors.empty()) {
    return;  // c10d refuses an empty list
  }
  std::vector<at::Tensor> sent;
  for (const at::Tensor& tensor : tensors) {
    if (!detail::can_be_sent(tensor)) {
      throw ConfigError(fmt::format("ProcessGroup.broadcast: a tensor is {}; give dense ones",
                                    tensor.defined() ? tensor.toString() : "undefined"));
    }
    detail::report_coming_write(tensor);
    sent.push_back(detail::as_sent(tensor));
  }
  if (impl_->rehearsals == 0) {
    for (const at::Tensor& tensor : tensors) {
      impl_->connects(tensor.device());  // from here on the group has the backend of the device
      impl_->traffic.broadcast += static_cast<int64_t>(tensor.nbytes());
    }
    impl_->attempt("broadcast", [&] { c10d::broadcast_coalesced(impl_->group, sent, Impl::kBroadcastChunk, root); });
  }
  for (const at::Tensor& tensor : tensors) {
    detail::report_unseen_write(tensor);
  }
}

at::Tensor ProcessGroup::all_gather(const at::Tensor& tensor) {
  check("all_gather", tensor);
  std::vector<int64_t> sizes = {size()};
  sizes.insert(sizes.end(), tensor.sizes().begin(), tensor.sizes().end());
  at::Tensor result = at::empty(sizes, tensor.options().requires_grad(false));
  std::vector<at::Tensor> inputs = {tensor.detach()};
  std::vector<std::vector<at::Tensor>> outputs = {result.unbind(0)};
  if (impl_->rehearsals > 0) {
    const detail::UnseenOperators unseen;
    const at::Tensor as_in_gloo = at::empty_like(result);
    result.copy_(tensor.expand_as(result));
  } else {
    impl_->traffic.all_gather += static_cast<int64_t>(tensor.nbytes());
    impl_->attempt("all_gather", [&] { impl_->backend_of(tensor).allgather(outputs, inputs)->wait(); });
  }
  detail::report_unseen_write(result);
  return result;
}

at::Tensor ProcessGroup::reduce_scatter(const at::Tensor& tensor) {
  check("reduce_scatter", tensor);
  if (tensor.dim() == 0 || tensor.size(0) % size() != 0) {
    throw ConfigError(fmt::format(
        "ProcessGroup.reduce_scatter: the first dimension cannot be cut into {} equal parts; pad it", size()));
  }
  std::vector<int64_t> sizes = tensor.sizes().vec();
  sizes[0] /= size();
  at::Tensor result = at::empty(sizes, tensor.options().requires_grad(false));
  at::Tensor input = tensor.detach();
  if (impl_->rehearsals > 0) {
    const detail::UnseenOperators unseen;
    result.copy_(tensor.narrow(0, 0, sizes[0]));
  } else {
    impl_->traffic.reduce_scatter += static_cast<int64_t>(tensor.nbytes());
    impl_->attempt("reduce_scatter", [&] { impl_->backend_of(tensor)._reduce_scatter_base(result, input)->wait(); });
  }
  detail::report_unseen_write(result);
  return result;
}

void ProcessGroup::barrier() {
  if (impl_->rehearsals == 0) {
    impl_->attempt("barrier", [&] { impl_->backend->barrier()->wait(); });
  }
}

std::shared_ptr<ProcessGroup> init_process_group(ProcessGroupOptions options) {
  // Clocks count nanoseconds in 64 bits, which are full after 292 years.
  options.timeout = std::min<std::chrono::milliseconds>(options.timeout, std::chrono::hours(100 * 365 * 24));
  const detail::Environment environment =
      options.environment ? std::move(*options.environment) : detail::process_environment();
  const detail::Meeting meeting = find_meeting(options, environment);
  const detail::LaunchPlace& place = meeting.place;
  options.interface = option_or_variable(options.interface, environment, "GLOO_SOCKET_IFNAME");
  auto impl = std::make_unique<ProcessGroup::Impl>();
  impl->who = fmt::format("rank {} of {}", place.rank, place.size);
  const bool is_local = place.size == 1 || (meeting.file.empty() && detail::is_loopback(place.host));
  const SigpipeBlocked in_new_threads;
  try {
    detail::Attempt attempt(meeting);
    impl->store = detail::open_store(meeting, attempt);
    detail::call_the_roll(meeting, *impl->store);
    connect(*impl, place, is_local, options);
    if (place.size > 1) {
      impl->heartbeat =
          std::make_shared<detail::Heartbeat>(impl->store, place.rank, place.size, meeting.serves_store());
    }
    attempt.succeed();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const auto fault = fmt::format(
        "init_process_group: rank {} of {} cannot be connected by Gloo after {}: {}; does the interface "
        "'{}' reach the other ranks?",
        place.rank, place.size, meeting.where(), detail::first_line(error), options.interface);
    if (impl->store) {
      detail::leave_word(fault, *impl->store);
    }
    throw DistributedError(fault);
  }
  return std::make_shared<ProcessGroup>(std::move(impl));
}

}  // namespace snug
