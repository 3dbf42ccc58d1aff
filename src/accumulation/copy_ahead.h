#pragma once
// CopyAhead: the next micro-batch goes to the device while the device computes on this one.

#include <optional>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "snug/accumulation.h"

namespace snug::detail {

/// One copy at a time, all on one stream of their own. Not for several threads.
class CopyAhead final {
 public:
  /// batch.to(device), but for the copies of host tensors: they are there after wait().
  Batch start(const Batch& batch, c10::Device device);
  /// Work that the stream of start() is given from here on begins when the copy is done. Before that, nobody may read
  /// the batch of start(), or let go of it. The host does not wait. Nothing if no copy is under way.
  void wait();

 private:
  struct Copy {
    c10::Stream computing;  // which the memory belongs to
    c10::Event done;
  };

  std::optional<c10::Stream> side_;
  std::optional<Copy> copy_;
};

}  // namespace snug::detail
