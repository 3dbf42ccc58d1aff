#include "src/distributed/rendezvous.h"

#include <functional>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <arpa/inet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <unistd.h>

#include "snug/core.h"
#include "src/core/first_line.h"

namespace snug::detail {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPause = std::chrono::milliseconds(10);
constexpr auto kGrace = std::chrono::seconds(2);
constexpr const char* kError = "snug/error";

c10::intrusive_ptr<c10d::Store> prefixed(const std::string& prefix, const c10::intrusive_ptr<c10d::Store>& store) {
  return c10::make_intrusive<c10d::PrefixStore>(prefix, store);
}

// c10d listens on all interfaces, and anybody who reaches the store may write to the store. If only ranks of this
// machine will come, c10d gets a socket that only this machine can reach. Returns no socket if the port is taken:
// either a store of this process serves the port already, or c10d reports the error.
std::optional<int> listen_on_loopback(const LaunchPlace& place) {
  sockaddr_in6 six = {};
  six.sin6_family = AF_INET6;
  six.sin6_port = htons(place.port);
  six.sin6_addr = in6addr_loopback;
  sockaddr_in four = {};
  four.sin_family = AF_INET;
  four.sin_port = htons(place.port);
  four.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const bool is_six = place.host == "::1";
  const int socket = ::socket(is_six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int yes = 1;  // a port counts as free even if connections were closed a moment ago
  if (socket < 0 || ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) != 0 ||
      ::bind(socket, is_six ? reinterpret_cast<sockaddr*>(&six) : reinterpret_cast<sockaddr*>(&four),
             is_six ? sizeof(six) : sizeof(four)) != 0) {
    ::close(socket);
    return std::nullopt;
  }
  return socket;
}

// A client waits for ever for an answer if another program listens at the address. So the client connects in a separate
// thread, and the thread is left behind if connecting takes too long: the attempt fails anyway.
c10::intrusive_ptr<c10d::Store> connect_in_time(const std::string& host, const c10d::TCPStoreOptions& options) {
  auto promise = std::make_shared<std::promise<c10::intrusive_ptr<c10d::Store>>>();
  auto result = promise->get_future();
  std::thread([promise, host, options] {
    try {
      promise->set_value(c10::make_intrusive<c10d::TCPStore>(host, options));
    } catch (...) {
      promise->set_exception(std::current_exception());
    }
  }).detach();
  if (result.wait_for(options.timeout + kGrace) == std::future_status::timeout) {
    throw DistributedError("what listens there does not answer as rank 0 would");
  }
  return result.get();
}

// Whether the ranks at a store are of another job, according to rank 0's entry in the store. False if the store
// disappears during the call: the next use of the store finds the loss.
bool is_of_another_job(const Meeting& meeting, c10d::Store& store) {
  constexpr const char* kJob = "snug/job";
  const std::string job = "job " + meeting.token;
  if (meeting.serves_store()) {
    store.set(kJob, job);
    return false;
  }
  try {
    return store.get_to_str(kJob) != job;
  } catch (const std::exception&) {
    return false;
  }
}

c10::intrusive_ptr<c10d::Store> open_tcp_store(const Meeting& meeting) {
  const LaunchPlace& place = meeting.place;
  c10d::TCPStoreOptions options;
  options.port = place.port;
  options.isServer = meeting.serves_store();
  options.waitWorkers = false;  // the roll call waits, and names the missing ranks
  options.multiTenant = true;   // a process may form several groups
  options.timeout = meeting.timeout;
  try {
    c10::intrusive_ptr<c10d::Store> store;
    if (options.isServer) {
      options.masterListenFd = is_loopback(place.host) ? listen_on_loopback(place) : std::nullopt;
      store = c10::make_intrusive<c10d::TCPStore>(place.host, options);
    } else {
      store = connect_in_time(place.host, options);
    }
    // torchrun's agents keep a single store for all attempts, and count the attempts together.
    const bool is_kept = place.launcher_serves_store && !place.attempt.empty();
    if (place.launcher_serves_store || !is_of_another_job(meeting, *store)) {
      return is_kept ? prefixed("attempt " + place.attempt, store) : store;
    }
  } catch (const std::exception& error) {
    throw DistributedError(
        fmt::format("init_process_group: rank {} cannot {} {}: {}; {}", place.rank,
                    options.isServer ? "listen at" : "reach rank 0 at", meeting.where(), first_line(error),
                    options.isServer ? "is the port in use by another job? choose another MASTER_PORT"
                                     : "is rank 0 running, and is this its address?"));
  }
  throw DistributedError(fmt::format(
      "init_process_group: the ranks at {} are of another job than this rank {}; choose another MASTER_PORT, "
      "or give all ranks of a job the same SNUG_JOB_TOKEN",
      meeting.where(), place.rank));
}

std::string rank_key(int rank) { return fmt::format("snug/rank/{}", rank); }

// The store ends with the rank that serves the store. So the serving rank waits until the other arrived ranks have read
// the reason.
void part(const Meeting& meeting, c10d::Store& store) {
  store.add("snug/told", 1);
  const auto deadline = Clock::now() + kGrace;
  while (meeting.serves_store() && store.add("snug/told", 0) < store.add("snug/arrived", 0) &&
         Clock::now() < deadline) {
    std::this_thread::sleep_for(kPause);
  }
}

// The error in the roll call as seen by this rank; empty: no error so far.
std::string fault_at_arrival(const Meeting& meeting, c10d::Store& store) {
  const LaunchPlace& place = meeting.place;
  store.add("snug/arrived", 1);
  const std::string size = std::to_string(place.size);
  const std::string first = store.compareSet("snug/size", std::string(), size);
  if (first != size) {
    return fmt::format(
        "init_process_group: rank {} was told of {} ranks, another of {}, at {}; start all with the same number",
        place.rank, size, first, meeting.where());
  }
  // The rank's own entry comes last, because a rank that sees all ranks goes on.
  if (store.add(rank_key(place.rank), 1) > 1) {
    return fmt::format(
        "init_process_group: rank {} is at {} twice; were two processes given the same rank, or is this left over from "
        "another run?",
        place.rank, meeting.where());
  }
  return {};
}

std::string wait_for_all(const Meeting& meeting, c10d::Store& store) {
  const auto deadline = Clock::now() + meeting.timeout;
  std::vector<int> missing(static_cast<size_t>(meeting.place.size));
  std::iota(missing.begin(), missing.end(), 0);
  std::vector<std::string> all;
  for (const int rank : missing) {
    all.push_back(rank_key(rank));
  }
  while (true) {
    const bool are_there = store.check(all);
    if (store.check({kError})) {
      return store.get_to_str(kError);
    }
    if (are_there) {
      return {};
    }
    if (Clock::now() > deadline) {
      std::erase_if(missing, [&](int rank) { return store.check({rank_key(rank)}); });
      return fmt::format(
          "init_process_group: {} of {} ranks did not come to {} within {} s: {}; were they started, and do they live?",
          missing.size(), meeting.place.size, meeting.where(), std::chrono::duration<double>(meeting.timeout).count(),
          fmt::join(missing, ", "));
    }
    std::this_thread::sleep_for(kPause);
  }
}

c10::intrusive_ptr<c10d::Store> open_this_store(const Meeting& meeting) {
  c10::intrusive_ptr<c10d::Store> store;
  if (!meeting.file.empty()) {
    store = c10::make_intrusive<c10d::FileStore>(meeting.file, meeting.place.size);
  } else if (!meeting.place.host.empty()) {
    store = open_tcp_store(meeting);
  } else {
    store = c10::make_intrusive<c10d::HashStore>();
  }
  store->setTimeout(meeting.timeout);
  // Ranks of another job have other keys.
  return meeting.token.empty() ? store : prefixed("job " + meeting.token, store);
}

// The attempts of this process at a store.
struct Attempts {
  int formed = 0;
  int failed = 0;  // since the last formed group
};

// Applies `change`, and returns the attempts before the change.
Attempts with_attempts(const std::string& where, const std::function<void(Attempts&)>& change) {
  static std::mutex mutex;
  static std::map<std::string, Attempts> all;
  const std::lock_guard lock(mutex);
  const Attempts before = all[where];
  change(all[where]);
  return before;
}

// A store that outlives an attempt keeps the error of a failed attempt. A rank that comes later reads the reason, and
// tries again in the next attempt.
c10::intrusive_ptr<c10d::Store> of_attempt(const Attempt& attempt, const c10::intrusive_ptr<c10d::Store>& store) {
  const auto in_try = [&](int number) { return prefixed(fmt::format("group {}/{}", attempt.formed(), number), store); };
  int number = 0;
  while (number < attempt.failed() && in_try(number)->check({kError})) {
    ++number;
  }
  return in_try(number);
}

// A restarted rank may find the store of the rank's predecessor, as long as rank 0 has not noticed the loss of a rank.
// Waits until the old store is gone, or until the deadline; after the deadline the roll call reports the error.
bool was_left_over(const Meeting& meeting, c10d::Store& store, Clock::time_point deadline) {
  const LaunchPlace& place = meeting.place;
  const bool is_restarted = !place.attempt.empty() && place.attempt != "0";
  if (!is_restarted || meeting.serves_store() || place.launcher_serves_store || !meeting.file.empty()) {
    return false;
  }
  try {
    while (Clock::now() < deadline && store.check({rank_key(place.rank)})) {
      std::this_thread::sleep_for(kPause);
    }
    return false;
  } catch (const std::exception&) {
    return Clock::now() < deadline;
  }
}

}  // namespace

bool Meeting::serves_store() const {
  return place.rank == 0 && file.empty() && !place.host.empty() && !place.launcher_serves_store;
}

std::string Meeting::where() const {
  if (!file.empty()) {
    return "file://" + file;
  }
  return place.host.empty() ? "memory" : fmt::format("tcp://{}:{}", place.host, place.port);
}

bool is_loopback(const std::string& host) { return host == "127.0.0.1" || host == "localhost" || host == "::1"; }

Attempt::Attempt(const Meeting& meeting) : where_(meeting.where() + " " + meeting.token) {
  const Attempts before = with_attempts(where_, [](Attempts& here) { ++here.formed; });
  formed_ = before.formed;
  failed_ = before.failed;
}

Attempt::~Attempt() {
  with_attempts(where_, [this](Attempts& here) {
    here.formed -= is_formed_ ? 0 : 1;
    here.failed = is_formed_ ? 0 : failed_ + 1;
  });
}

c10::intrusive_ptr<c10d::Store> open_store(const Meeting& meeting, const Attempt& attempt) {
  const auto deadline = Clock::now() + meeting.timeout;
  c10::intrusive_ptr<c10d::Store> store;
  do {
    store = of_attempt(attempt, open_this_store(meeting));
  } while (was_left_over(meeting, *store, deadline));
  return store;
}

void call_the_roll(const Meeting& meeting, c10d::Store& store) {
  std::string fault;
  try {
    fault = fault_at_arrival(meeting, store);
    if (fault.empty()) {
      fault = wait_for_all(meeting, store);
    }
    if (!fault.empty()) {
      store.set(kError, fault);
      part(meeting, store);
    }
  } catch (const std::exception& error) {
    if (fault.empty()) {
      fault = fmt::format("init_process_group: rank {} lost {} before all ranks were there: {}; has rank 0 died?",
                          meeting.place.rank, meeting.where(), first_line(error));
    }
  }
  if (!fault.empty()) {
    throw DistributedError(fault);
  }
}

void leave_word(const std::string& fault, c10d::Store& store) noexcept {
  try {
    store.set(kError, fault);
  } catch (const std::exception&) {  // the other ranks have lost the store as well
  }
}

}  // namespace snug::detail
