#pragma once
// SaveOnHost: what autograd saves for backward leaves the memory it is computed in, and comes back when backward needs it. From a GPU
// it goes to pinned host memory; on a CPU it goes to a file. Values are not touched: gradients are equal to the bit.
//
//   {
//     snug::SaveOnHost offload({.directory = "/scratch"});
//     loss = model->forward(x).sum();
//   }
//   loss.backward();
//
// With checkpointed regions inside it, what is left of their activations, the inputs, leaves as well.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "snug/core/bytes.h"
#include "snug/planner/profile.h"

namespace snug {

struct OffloadOptions {
  /// Tensors whose memory is smaller stay where they are.
  Bytes min_bytes = Bytes(1 << 20);
  /// Most bytes of pinned memory, and of the file, at once; tensors past it stay where they are.
  Bytes cap = Bytes::unlimited();
  /// Where the file of CPU tensors lies; empty: the system's temporary directory. On many systems that one is itself memory (tmpfs): give
  /// one on a disk. The file has no name, so it is gone when the process is.
  std::filesystem::path directory = {};
};

/// Bytes so far; of a tensor that is saved several times they are counted once.
struct OffloadReport {
  int64_t bytes_out = 0;      ///< copied to the host, or written to the file
  int64_t bytes_back = 0;     ///< brought back for backward
  int64_t bytes_kept = 0;     ///< left where they were, because of the cap or a write that failed
  int64_t failed_writes = 0;  ///< tensors that stayed in memory because the file could not take them
  std::string failure = {};   ///< why the last of these failed

  /// For people: one line, or two if a write failed.
  std::string str() const;
};

/// How fast bytes go to a file in `directory` (empty: the system's temporary one) and come back, for plans that may offload: by writing and
/// reading 32 MiB a few times. That stays in the system's cache where there is room, so a plan that offloads much more may find the disk
/// slower; and a directory that is itself memory (tmpfs) is as fast as memory, and offloading to it frees nothing. Throws Error if the
/// file cannot be made, written or read.
OffloadLink measure_offload_link(const std::filesystem::path& directory = {});

/// While it lives, tensors that autograd saves on this thread go to the host. They come back in the order of backward, one ahead of the one in
/// use. A storage goes once, however many tensors on it are saved, and is given back whole. Parameters (leaves that require a gradient) stay,
/// and so do views of leaves, such as slices of a batch. Everything else may go; a tensor that something else holds until backward, such as
/// the caller's input, costs its transfer and frees nothing, which cannot be known when it is saved.
/// What goes is what autograd by itself would have in backward: a tensor waits until the next operator that does not write to it, and goes again where
/// operators on this thread write to it later in ways that autograd does not count, such as through data().
/// A tensor's memory is free when its transfer is complete. At most two are under way: a slow disk makes forward wait, never
/// memory grow. If a write fails, the tensor stays in memory, and report() tells. A tensor that cannot be read back makes backward throw
/// snug::Error with the path and the reason. retain_graph works; a graph that is dropped gives its room back.
/// Of hooks and checkpointed regions inside each other the innermost alone is asked. On devices other than CPU and CUDA nothing leaves.
/// A child made by fork() gets a file of its own; a graph that was made before belongs to the parent.
/// Throws ConfigError for a cap that is smaller than min_bytes, and if another library sees operators in the way that this does (DispatchKey::Fake);
/// Error if the file cannot be made, at once if `directory` is given, else with the first CPU tensor.
class [[nodiscard]] SaveOnHost final {
 public:
  explicit SaveOnHost(OffloadOptions options = {});
  ~SaveOnHost();
  SaveOnHost(const SaveOnHost&) = delete;
  SaveOnHost& operator=(const SaveOnHost&) = delete;

  OffloadReport report() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace snug
