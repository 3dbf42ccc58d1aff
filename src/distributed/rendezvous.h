#pragma once
// How ranks find each other: through a store that all ranks see, and a roll call in the store. The roll call reports
// errors before anyone waits for a connection.

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "src/distributed/launch_environment.h"

namespace snug::detail {

struct Meeting {
  LaunchPlace place = {};
  std::string file = {};   ///< used instead of place.host and place.port
  std::string token = {};  ///< the job's; empty: none
  std::chrono::milliseconds timeout = {};

  /// For messages: "tcp://host:1234", "file:///path", "memory".
  std::string where() const;
  /// Whether the other ranks connect to this process.
  bool serves_store() const;
};

/// Whether the host is this machine under a name that no other machine can reach.
bool is_loopback(const std::string& host);

/// An attempt to form a group. A program may form several groups at the same store, one after the other, each separate
/// from the earlier groups. Failed attempts do not count as groups, because the number of attempts may differ between
/// ranks.
class [[nodiscard]] Attempt final {
 public:
  explicit Attempt(const Meeting& meeting);
  ~Attempt();
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;

  /// The number of groups that this process has formed at the store, and the number of failed attempts since the last
  /// formed group.
  int formed() const { return formed_; }
  int failed() const { return failed_; }
  /// Notes that the group is formed.
  void succeed() { is_formed_ = true; }

 private:
  std::string where_;
  int formed_ = 0;
  int failed_ = 0;
  bool is_formed_ = false;
};

/// Opens the store of the attempt. Throws DistributedError.
c10::intrusive_ptr<c10d::Store> open_store(const Meeting& meeting, const Attempt& attempt);

/// Returns when all ranks have arrived. Throws DistributedError, on every rank that has arrived, if
/// - a rank has arrived twice;
/// - ranks disagree on the number of ranks;
/// - some ranks do not arrive in time.
void call_the_roll(const Meeting& meeting, c10d::Store& store);

/// Notes in the store that the attempt failed, and why, so a rank that tries again at the store makes a separate
/// attempt. Throws nothing: the store may be gone.
void leave_word(const std::string& fault, c10d::Store& store) noexcept;

}  // namespace snug::detail
