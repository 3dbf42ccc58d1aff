#pragma once
// LateWrites: writes to memory of the host that wait until somebody uses the memory.
//
// Problem: the CPU takes long to update weights in the host's memory, and the device would be idle for so long.
// Options: a thread for updates, with a lock in every reader, or the thread that uses a weight.
// Choice: the first user of a weight makes the weight's update. Operators of the device run after their calls. So the
// device computes with earlier weights of forward, while the host updates the next weight.
// Consequences: updates come in the order in which forward uses the weights. An update that fails throws in the
// operator, or in the call, that asks for the values. The copy to the device comes after the update, and not ahead.

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace snug::detail {

class LateWrites final {
 public:
  LateWrites() = default;
  ~LateWrites();  // drops the writes that wait; the end of a weight's home has made the weight's
  LateWrites(const LateWrites&) = delete;
  LateWrites& operator=(const LateWrites&) = delete;

  /// `write` comes before others use the memory of `tensors`; there is at least one. No policy and no window sees the
  /// write's operators.
  void add(const std::vector<at::Tensor>& tensors, std::function<void()> write);
  /// Makes the writes, in any order.
  void make();
};

/// Makes the writes that wait to use the memory of `tensor`. Throws as a write throws, once.
void make_late_writes(const at::Tensor& tensor);
bool has_late_writes(const c10::Storage& storage);

}  // namespace snug::detail
