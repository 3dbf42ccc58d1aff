#pragma once
// HostHome: the weights of a model on a device, in the host's memory while no operator uses the weights.
//
// Problem: the weights of a model may be larger than the memory of the model's device.
// Options: exchange the parameters' tensors, or exchange the memory below the tensors. Views, graphs and optimizers
// know a parameter by its tensor.
// Choice: a storage stays the same, and gets memory of the device when an operator uses the storage. The memory is a
// part of one allocation, so the bytes of the device are the same at any time. Copies run on a stream of their own,
// beside operators that do not use the storage. The stream waits for the last operators that used the memory, and an
// operator waits for the copy of its weights alone.
// Consequences: an access to the memory of a storage that is out throws LibTorch's error, with the cure. Where gaps
// leave an operand no room, the operand gets an allocation of its own until the operator has run.

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include "src/activations/spill_extents.h"
#include "src/memory/weight_window.h"

namespace snug::detail {

class HostHome final : public WeightHome {
 public:
  /// Copies the values of `storages`, which are on one device, to page-locked memory, or takes the values that storages
  /// keep (kept_values), which no copy must be using. The storages are as before. Throws Error if the host has too
  /// little memory.
  explicit HostHome(std::vector<c10::Storage> storages);

  /// Releases the memory of all storages, which are out from here on. The HostHome must live until take_back().
  void take_out();
  /// Allocates the window on the device, in place of an earlier window. All storages must be out. Throws as an
  /// allocation does; then there is no window.
  void open_window(int64_t bytes);
  /// All storages must be out.
  void close_window();
  bool has_window() const { return window_.defined(); }
  /// All storages must be out. Makes late writes, and gives all storages memory of their own again. Throws as a write
  /// or an allocation does; then the storages are as before.
  void take_back();

  bool has_room(size_t number) const override;
  bool brings_beside_operators() const override { return true; }
  void bring(size_t number) override;
  void use(size_t number) override;
  void let_go(size_t number, bool is_written) override;
  void finish_copies(size_t number) override;

  /// The bytes of a window for `storages`: for `count` of the largest, or for all. With two, the largest operand of an
  /// operator and the largest operand of the next operator have room.
  static int64_t window_for(const std::vector<c10::Storage>& storages, size_t count) {
    return WeightWindow::bytes_for(storages, static_cast<int64_t>(count), SpillExtents::kAlignment);
  }

 private:
  struct Weight {
    c10::Storage storage;
    at::Tensor values;                  // on the host
    std::optional<int64_t> place = {};  // in the window
    bool is_in = false;
    std::optional<c10::Event> copied = {};  // the end of the last copy, in or out
    std::vector<c10::Stream> users = {};    // since bring()
  };

  int64_t bytes_of(size_t number) const;

  std::vector<Weight> weights_;
  at::Tensor window_;
  SpillExtents extents_{0};  // of the window
  c10::Stream copies_;
};

}  // namespace snug::detail
