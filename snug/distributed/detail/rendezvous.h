#pragma once
// How ranks find each other: a store that all of them see, and a roll call in it, so that what is wrong is said before anyone waits for
// a connection.

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

/// Throws DistributedError.
c10::intrusive_ptr<c10d::Store> open_store(const Meeting& meeting);

/// Returns when all ranks are there. Throws DistributedError, on every rank that is there, if one is twice, if their numbers differ or if
/// some do not come in time.
void call_the_roll(const Meeting& meeting, c10d::Store& store);

}  // namespace snug::detail
