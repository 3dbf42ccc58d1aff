#pragma once
// measure_offload_link: the speed of the way to disk or to host memory and back, for plans that may offload.
//
// SaveOnHost: moves the tensors that autograd saves for backward out of the memory that they are computed in, and back
// when backward needs them. From a GPU they go to pinned host memory, on a CPU to a file. Values are not touched:
// gradients are equal to the bit.
//
//   {
//     snug::SaveOnHost offload({.directory = "/scratch"});
//     loss = model->forward(x).sum();
//   }
//   loss.backward();
//
// Checkpointed regions inside it keep only their inputs, and these leave as well.

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "snug/core.h"
#include "snug/profile.h"

namespace c10 {
struct Device;
}

namespace snug {

/// Measures the speed of writing to a file in `directory` (empty: the system's temporary one) and of reading back, for
/// plans that may offload. It writes and reads 32 MiB a few times. These bytes stay in the system's cache if there is
/// room, so a plan that offloads much more may find the disk slower. A directory that is itself memory (tmpfs) is as
/// fast as memory, and offloading to it frees nothing. Throws Error if the file cannot be made, written or read.
OffloadLink measure_offload_link(const std::filesystem::path& directory = {});
/// The same for tensors of `device`. If that is not the CPU, the link leads to pinned memory of the host. 32 MiB are
/// copied there and back a few times, which take as much of the device's memory meanwhile, and are waited for. Throws
/// ConfigError if a directory is given all the same, and c10::OutOfMemoryError.
OffloadLink measure_offload_link(const std::filesystem::path& directory, c10::Device device);

struct OffloadOptions {
  /// Tensors whose memory is smaller stay where they are.
  Bytes min_bytes = Bytes(1 << 20);
  /// The most bytes of pinned memory, and of the file, at one time. Tensors beyond it stay where they are.
  Bytes cap = Bytes::unlimited();
  /// The directory of the file for CPU tensors; empty: the system's temporary directory. On many systems that directory
  /// is itself memory (tmpfs): give one on a disk. The file has no name, so it disappears with the process.
  std::filesystem::path directory = {};
};

/// Bytes so far. A tensor that is saved several times counts once.
struct OffloadReport {
  int64_t bytes_out = 0;      ///< copied to the host, or written to the file
  int64_t bytes_back = 0;     ///< brought back for backward
  int64_t bytes_kept = 0;     ///< left where they were, because of the cap or a write that failed
  int64_t failed_writes = 0;  ///< tensors that stayed in memory because the file could not take them
  std::string failure = {};   ///< why the last of these failed

  /// For people: one line, or two if a write failed.
  std::string str() const;
};

/// While it lives, tensors that autograd saves on this thread go to the host. They come back in the order of backward,
/// one ahead of the one in use. A storage goes once, however many tensors on it are saved, and comes back whole.
/// - Parameters (leaves that require a gradient) stay, and so do views of leaves, such as slices of a batch. Everything
///   else may go. If something else holds a tensor until backward, such as the caller its input, the transfer costs
///   time and frees nothing; this cannot be known at the time of saving.
/// - The stored values are those that autograd by itself would have in backward. Therefore a tensor leaves only at the
///   next operator that does not write to it. It leaves again if operators on this thread write to it later in ways
///   that autograd does not count, such as through data().
/// - A tensor's memory is free when its transfer is complete. At most two transfers run at a time: a slow disk makes
///   forward wait, but does not make memory grow.
/// - If a write fails, the tensor stays in memory, and report() shows it. If a tensor cannot be read back, backward
///   throws snug::Error with the path and the reason.
/// - retain_graph works. A dropped graph gives its room back.
/// - Of nested hooks and checkpointed regions only the innermost is asked. On devices that are neither the CPU nor
///   an accelerator nothing leaves.
/// - A child made by fork() gets a file of its own; a graph that was made before belongs to the parent.
/// Throws ConfigError if the cap is smaller than min_bytes, or if another library observes operators in the same way
/// (DispatchKey::Fake). Throws Error if the file cannot be made: at once if `directory` is given, otherwise at the
/// first CPU tensor.
class [[nodiscard]] SaveOnHost final {
 public:
  explicit SaveOnHost(OffloadOptions options = {});
  ~SaveOnHost();
  SaveOnHost(const SaveOnHost&) = delete;
  SaveOnHost& operator=(const SaveOnHost&) = delete;

  /// Bytes and waits of everything that was offloaded so far.
  OffloadReport report() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace snug
