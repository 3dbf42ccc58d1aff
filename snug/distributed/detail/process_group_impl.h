#pragma once
// What is inside a ProcessGroup. c10d's Reducer wants a c10d::ProcessGroup, which is a table of backends by device.

#include <exception>
#include <string_view>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "snug/distributed/process_group.h"

namespace snug {

class ProcessGroup::Impl {
 public:
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::Backend> backend;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  int local_rank = 0;
  Traffic traffic = {};

  /// What `error`, thrown by c10d during `operation`, is to snug's callers.
  [[noreturn]] void fail(std::string_view operation, const std::exception& error) const;
  /// Waits for what an operation returned.
  void finish(std::string_view operation, const c10::intrusive_ptr<c10d::Work>& work) const;
};

}  // namespace snug
