#pragma once
// How ranks find each other: a store that all of them see, and a roll call in it, so that what is wrong is said before
// anyone waits for a connection.

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "snug/distributed/launch_environment.h"

namespace snug::detail {

struct Meeting {
  LaunchPlace place = {};
  std::string file = {};  ///< instead of place.host and place.port
  std::chrono::milliseconds timeout = {};

  /// For messages: "tcp://host:1234", "file:///path", "memory".
  std::string where() const;
  /// Whether the others connect to this process.
  bool serves_store() const;
};

/// Whether the host is this machine under a name that no other can reach.
bool is_loopback(const std::string& host);

/// An attempt to form a group. A program may form one after another at the same place, each apart from those before;
/// attempts that came to nothing are not counted among them, for the others may have made fewer, or more.
class [[nodiscard]] Attempt final {
 public:
  explicit Attempt(const Meeting& meeting);
  ~Attempt();
  Attempt(const Attempt&) = delete;
  Attempt& operator=(const Attempt&) = delete;

  /// Groups that this process has formed there before, and attempts since that have failed.
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

/// Returns when all ranks are there. Throws DistributedError, on every rank that is there, if one is twice, if their
/// numbers differ or if some do not come in time.
void call_the_roll(const Meeting& meeting, c10d::Store& store);

/// Says in the store that the attempt came to nothing, and why, so that who tries again there does so apart from it.
/// Throws nothing: the store may be gone.
void leave_word(const std::string& fault, c10d::Store& store) noexcept;

}  // namespace snug::detail
