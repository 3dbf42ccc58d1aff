#pragma once
// FusedOptimizer::StateInFile: the state of an optimizer in a file. A parameter's state is cut into pieces; a piece has
// the same elements of all tensors of the state. Pieces are read, updated and written. Several small pieces are one
// block.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "src/core/file_memory.h"
#include "src/core/spill_disk.h"
#include "src/optim/fused_optimizer_parts.h"
#include "src/optim/state_stream.h"

namespace snug {

class FusedOptimizer::StateInFile {
 public:
  /// `multiple`: see FusedOptimizer::shard_multiple; 0: no parameter is cut. Throws Error if the file cannot be made.
  StateInFile(const StateFile& file, int64_t multiple, detail::SpillCalls& calls);

  const StateFile& file() const { return file_; }
  detail::SpillCalls& calls() const { return calls_; }

  /// Reserves room in the file for each tensor of `state` that has no room yet and is on the meta device; the tensor
  /// stays on the meta device. A scalar gets no room: place() makes the scalar in memory, with the value zero. Throws
  /// Error, with nothing reserved, if the disk is full.
  void place(ParameterState& state);
  /// The end of the reserved room. Setting an earlier end gives back the room behind the end.
  int64_t end() const { return end_; }
  void set_end(int64_t end) { end_ = end; }

  /// Throws Error if the file cannot be written.
  void write(ParameterState& state, std::string_view tensor, const at::Tensor& value);
  /// A copy in memory. Throws Error if the file cannot be read, or has other bytes than were written.
  at::Tensor read(const ParameterState& state, std::string_view tensor);
  /// mapped() is the whole file. lent() is a tensor in the file, which takes no tensor memory. The tensor shows the
  /// content of the file at the time of reading, also after write() and after updates. Values that the program writes
  /// into the tensor stay in this process.
  std::shared_ptr<detail::FileMemory> mapped() const {
    return detail::FileMemory::of(disk_.descriptor(), end_, disk_.description());
  }
  static at::Tensor lent(const ParameterState& state, std::string_view tensor,
                         const std::shared_ptr<detail::FileMemory>& memory);

  /// An update that streams through the window. Until `stream->run()` nothing has been changed.
  struct Streamed {
    std::vector<std::unique_ptr<ParameterState>> states;  // the states of the pieces
    std::vector<ParameterState*> whole;                   // the states that the pieces are cut from
    at::Tensor window;
    std::unique_ptr<detail::StateStream> stream;

    /// Makes the changes of an update to a state besides the state's tensors.
    void finish();
  };
  /// Allocates the window and prepares all blocks by `prepare`. Reads the first block, and throws Error if the first
  /// block cannot be read. `copied`: the name of the tensor that begins as a copy of the parameter, if the optimizer
  /// has such a tensor.
  Streamed stream(const std::vector<Work>& works, const std::function<std::function<void()>(const Work&)>& prepare,
                  std::optional<std::string_view> copied);

  /// The most bytes that stream() allocates for parameters with states like `states`.
  static int64_t workspace_bytes(const std::vector<ParameterState>& states, const StateFile& file, int64_t multiple);

 private:
  struct Piece;
  struct Block;
  // The rules for cutting states.
  struct Cut {
    int64_t slot_bytes;
    int64_t multiple;

    Cut(const StateFile& file, int64_t state_multiple);
    int64_t bytes_of(const ParameterState& state, int64_t begin, int64_t end) const;
    int64_t piece_of(const ParameterState& state) const;
  };
  std::vector<Block> blocks_of(const std::vector<Work>& works) const;
  void fill(const Block& block, const at::Tensor& memory, Streamed& streamed, Work& work,
            std::vector<detail::StatePart>& parts) const;

  StateFile file_;
  Cut cut_;
  detail::SpillCalls& calls_;
  detail::SpillDisk disk_;
  int64_t end_ = 0;
};

}  // namespace snug
