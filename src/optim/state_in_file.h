#pragma once
// FusedOptimizer::StateInFile: the state of an optimizer in a file. A parameter's state is cut into pieces, each of the
// same elements of all its tensors. Pieces are what is read, updated and written; several small ones are one block.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/fused_optimizer.h"
#include "src/core/file_memory.h"
#include "src/core/spill_disk.h"
#include "src/optim/state_stream.h"

namespace snug {

class FusedOptimizer::StateInFile {
 public:
  /// `multiple`: see FusedOptimizer::shard_multiple; 0: no parameter is cut. Throws Error if there can be no file.
  StateInFile(const StateFile& file, int64_t multiple, detail::SpillCalls& calls);

  const StateFile& file() const { return file_; }
  detail::SpillCalls& calls() const { return calls_; }

  /// Takes a place in the file for each tensor of `state` that has none and is on the meta device, where it stays; but
  /// makes it, of zero, if it is a scalar. Throws Error, with nothing placed, if the disk is full.
  void place(ParameterState& state);
  /// Behind the last place. To set it gives back those that lie behind.
  int64_t end() const { return end_; }
  void set_end(int64_t end) { end_ = end; }

  /// Throws Error if the file cannot be written.
  void write(ParameterState& state, std::string_view tensor, const at::Tensor& value);
  /// A copy in memory. Throws Error if the file cannot be read, or has other bytes than were written.
  at::Tensor read(const ParameterState& state, std::string_view tensor);
  /// Whether all of it was written.
  static bool is_written(const ParameterState& state, std::string_view tensor);
  /// All of the file, and a tensor in it, which takes no tensor memory. It shows what the file has when it is read, and
  /// after write() or an update what these have written; but what the program writes into it stays in this process.
  std::shared_ptr<detail::FileMemory> mapped() const {
    return detail::FileMemory::of(disk_.descriptor(), end_, disk_.description());
  }
  static at::Tensor lent(const ParameterState& state, std::string_view tensor,
                         const std::shared_ptr<detail::FileMemory>& memory);

  /// An update that streams through the window. Until `stream->run()` nothing has been changed.
  struct Streamed {
    std::vector<std::unique_ptr<ParameterState>> states;  // of the pieces
    std::vector<ParameterState*> whole;                   // whose pieces they are
    at::Tensor window;
    std::unique_ptr<detail::StateStream> stream;

    /// What an update changes in a state besides its tensors.
    void finish();
  };
  /// Allocates the window and prepares all blocks by `prepare`. Reads the first: throws Error if it cannot be read.
  /// `copied`: the name of the tensor, if there is one, that begins as a copy of its parameter.
  Streamed stream(const std::vector<Work>& works, const std::function<std::function<void()>(const Work&)>& prepare,
                  std::optional<std::string_view> copied);

  /// The most bytes that stream() allocates for parameters of such states.
  static int64_t workspace_bytes(const std::vector<ParameterState>& states, const StateFile& file, int64_t multiple);

 private:
  struct Piece;
  struct Block;
  // How states are cut.
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
