#pragma once
// How ranks find each other: through a store that all of them see, and a roll call in it. The roll call reports errors
// before anyone waits for a connection.

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "snug/distributed/launch_environment.h"

namespace snug::detail {

struct Meeting {
  LaunchPlace place = {};
  std::string file = {};   ///< instead of place.host and place.port
  std::string token = {};  ///< the job's; empty: none
  std::chrono::milliseconds timeout = {};

  /// For messages: "tcp://host:1234", "file:///path", "memory".
  std::string where() const;
  /// Whether the others connect to this process.
  bool serves_store() const;
};

/// Whether the host is this machine under a name that no other can reach.
bool is_loopback(const std::string& host);

/// An attempt to form a group. A program may form several groups at the same place, one after the other, each separate
/// from those before. Failed attempts do not count as groups, because the number of attempts may differ between ranks.
class [[nodiscard]] Attempt final {
 public:
  explicit Attempt(const Meeting& meeting);
  ~Attempt();
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;

  /// The number of groups that this process has formed at this place, and the number of failed attempts since then.
  int formed() const { return formed_; }
  int failed() const { return failed_; }
  /// The group is formed.
  void succeed() { is_formed_ = true; }

 private:
  std::string where_;
  int formed_ = 0;
  int failed_ = 0;
  bool is_formed_ = false;
};

/// Throws DistributedError.
c10::intrusive_ptr<c10d::Store> open_store(const Meeting& meeting, const Attempt& attempt);

/// Returns when all ranks are there. Throws DistributedError, on every rank that is there, if a rank is there twice, if
/// ranks disagree on the number of ranks, or if some do not come in time.
void call_the_roll(const Meeting& meeting, c10d::Store& store);

/// Notes in the store that the attempt failed, and why, so that a rank that tries again there makes a separate attempt.
/// Throws nothing: the store may be gone.
void leave_word(const std::string& fault, c10d::Store& store) noexcept;

}  // namespace snug::detail
