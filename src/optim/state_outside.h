#pragma once
// FusedOptimizer::StateOutside: the state of an optimizer outside of the memory of the parameters' device, in a file or
// in the host's memory, and updated by the CPU's kernels. A parameter's state is cut into pieces; a piece has the same
// elements of all tensors of the state. Several small pieces are one block. A block passes through the window: its
// state is read from the file and written, and gradients and parameters of a device are copied to the window and back.
// A parameter whose home is the host's memory (values_at_home) is updated there.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "src/core/file_memory.h"
#include "src/core/spill_disk.h"
#include "src/memory/late_writes.h"
#include "src/optim/fused_optimizer_parts.h"
#include "src/optim/state_stream.h"

namespace snug {

namespace detail {
/// Throws ConfigError, with the optimizer's name, if the window of `place` is too small or unlimited.
void check_window(std::string_view optimizer, const StatePlacement& place);
}  // namespace detail

class FusedOptimizer::StateOutside {
 public:
  /// `place`: StateFile or StateOnHost. `multiple`: see FusedOptimizer::shard_multiple; 0: no parameter is cut. Throws
  /// Error if the file cannot be made.
  StateOutside(const StatePlacement& place, int64_t multiple, detail::SpillCalls& calls);

  const StatePlacement& placement() const { return placement_; }
  detail::SpillCalls& calls() const { return calls_; }
  detail::LateWrites& late() { return late_; }

  /// Reserves room in the file for each tensor of `state` that has no room yet and is on the meta device; the tensor
  /// stays on the meta device. Scalars, and without a file all tensors, get no room: place() makes these tensors in the
  /// host's memory, of zeros. Throws Error, with nothing reserved, if the disk is full.
  void place(ParameterState& state);
  /// The end of the reserved room. Setting an earlier end gives back the room behind the end.
  int64_t end() const { return end_; }
  void set_end(int64_t end) { end_ = end; }

  /// Throws Error if the file cannot be written.
  void write(ParameterState& state, std::string_view tensor, const at::Tensor& value);
  /// The tensor in memory: a copy, if the tensor is in the file. Throws Error if the file cannot be read, or has other
  /// bytes than were written.
  at::Tensor read(const ParameterState& state, std::string_view tensor);
  /// mapped() is the whole file; null without a file. lent() is a tensor in the file, which takes no tensor memory, or
  /// the very tensor if the tensor is in memory. A tensor in the file shows the content of the file at the time of
  /// reading, also after write() and after updates. Values that the program writes into the tensor stay in this
  /// process.
  std::shared_ptr<detail::FileMemory> mapped() const {
    return disk_ ? detail::FileMemory::of(disk_->descriptor(), end_, disk_->description()) : nullptr;
  }
  static at::Tensor lent(const ParameterState& state, std::string_view tensor,
                         const std::shared_ptr<detail::FileMemory>& memory);

  /// An update that streams through the window. Until run() nothing has been changed.
  struct Streamed {
    std::vector<std::unique_ptr<ParameterState>> states;  // the states of the pieces
    std::vector<ParameterState*> whole;                   // the states that the pieces are cut from
    at::Tensor window;
    std::unique_ptr<detail::StateStream> stream;  // null: no state is in a file
    std::vector<std::function<void()>> updates;   // of the blocks, without a stream

    /// The update of a parameter, which may come when somebody uses one of the tensors.
    struct Late {
      std::vector<at::Tensor> used;
      std::vector<std::function<void()>> updates;  // of the blocks
    };
    std::vector<Late> late;

    /// Makes all but late updates. Throws Error if the file fails, and as a copy does. Then some parameters may have
    /// been updated.
    void run();
  };
  /// Allocates the window, page-locked if parameters are on a device, and prepares all blocks by `prepare`, which gets
  /// tensors in the host's memory. Throws Error if parameters are on a device and the host has too little memory. Reads
  /// the first block of a file, and throws Error if the first block cannot be read.
  /// `copied`: the name of the tensor that begins as a copy of the parameter, if the optimizer has such a tensor.
  Streamed stream(const std::vector<Work>& works, const std::function<std::function<void()>(const Work&)>& prepare,
                  std::optional<std::string_view> copied);

  /// The most bytes that stream() allocates for parameters on the CPU with states like `states`, with a file.
  static int64_t workspace_bytes(const std::vector<ParameterState>& states, const StateFile& file, int64_t multiple);

 private:
  struct Piece;
  struct Block;
  class DeviceCopies;
  // The rules for cutting states.
  struct Cut {
    int64_t slot_bytes;
    int64_t multiple;
    bool has_file;

    Cut(const StatePlacement& place, int64_t state_multiple);
    // Of the elements in the window: of states in a file, and of parameters and gradients of a device.
    int64_t bytes_of(const ParameterState& state, int64_t begin, int64_t end) const;
    int64_t piece_of(const ParameterState& state) const;
  };
  std::vector<Block> blocks_of(const std::vector<Work>& works) const;
  void fill(const Block& block, const at::Tensor& memory, std::optional<std::string_view> copied, Streamed& streamed,
            Work& work, std::vector<std::pair<at::Tensor, at::Tensor>>& first_values,
            std::vector<detail::StatePart>& parts, DeviceCopies& copies) const;

  StatePlacement placement_;
  Cut cut_;
  detail::SpillCalls& calls_;
  std::optional<detail::SpillDisk> disk_;
  int64_t end_ = 0;
  detail::LateWrites late_;  // updates of weights that wait for the weights' next users
};

}  // namespace snug
