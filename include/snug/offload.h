#pragma once
// SaveOnHost: moves the tensors that autograd saves for backward out of the memory of their device, and back when
// backward needs the tensors. Tensors of a GPU go to pinned host memory, tensors of a CPU to a file. Values do not
// change: gradients are equal to the bit. Checkpointed regions inside keep only their inputs, and the inputs leave as
// well.
//
//   {
//     snug::SaveOnHost offload({.directory = "/scratch"});
//     loss = model->forward(x).sum();
//   }
//   loss.backward();
//
// measure_offload_link: the speed of transfers to disk or to host memory and back, for plans that may offload.
//
//   snug::OffloadLink link = snug::measure_offload_link("/scratch");

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "snug/core.h"
#include "snug/offload_link.h"

namespace c10 {
struct Device;
}

namespace snug {

/// Measures the speed of writing to a file in `directory` (empty: the system's temporary directory) and of reading
/// back, for plans that may offload. The measurement writes and reads 32 MiB a few times. These bytes stay in the
/// system's cache if the cache has room, so a plan that offloads much more may find the disk slower. A directory in
/// memory (tmpfs) is as fast as memory, and offloading to such a directory frees nothing. Throws Error if the file
/// cannot be made, written or read.
OffloadLink measure_offload_link(const std::filesystem::path& directory = {});
/// The same for tensors of `device`. If `device` is not the CPU, the link leads to pinned memory of the host. The
/// measurement copies 32 MiB to the host and back a few times, takes as much of the device's memory for that time, and
/// waits for the copies. Throws ConfigError if a directory is given for a device other than the CPU, and
/// c10::OutOfMemoryError.
OffloadLink measure_offload_link(const std::filesystem::path& directory, c10::Device device);

struct OffloadOptions {
  /// Tensors with less memory do not leave.
  Bytes min_bytes = Bytes(1 << 20);
  /// The most bytes of pinned memory, and of the file, at one time. Tensors beyond the cap do not leave.
  Bytes cap = Bytes::unlimited();
  /// The directory of the file for CPU tensors; empty: the system's temporary directory. On many systems the temporary
  /// directory is in memory (tmpfs): give a directory on a disk. The file has no name, so the file disappears with the
  /// process.
  std::filesystem::path directory = {};
};

/// During the lifetime of the object, tensors that autograd saves on this thread go to the host. The tensors come back
/// in the order of backward, one tensor ahead of the tensor in use. A storage goes once, however many tensors on the
/// storage are saved, and comes back whole.
/// - Parameters (leaves that require a gradient) stay, and so do views of leaves, such as slices of a batch. All other
///   tensors may go. If another owner keeps a tensor until backward, such as the caller its input, the transfer costs
///   time and frees nothing; SaveOnHost cannot see other owners at the time of saving.
/// - The stored values equal the values that plain autograd would have in backward. Therefore a tensor leaves only at
///   the next operator that does not write to the tensor. The tensor leaves again if operators on this thread write to
///   it later without being counted by autograd, such as through data().
/// - A tensor's memory is free when its transfer is complete. At most two transfers run at a time: a slow disk makes
///   forward wait, but does not make memory grow.
/// - If a write fails, the tensor stays in memory, and report() shows the failure. If a tensor cannot be read back,
///   backward throws snug::Error with the path and the reason.
/// - retain_graph works. A dropped graph gives its room back.
/// - Of nested hooks and checkpointed regions only the innermost is asked. On devices that are neither the CPU nor an
///   accelerator nothing leaves.
/// - A child made by fork() gets a file of its own; a graph from before the fork belongs to the parent.
/// Throws ConfigError if the cap is smaller than min_bytes, or if another library observes operators through the same
/// mechanism (DispatchKey::Fake). Throws Error if the file cannot be made: at once if `directory` is given, otherwise
/// at the first CPU tensor.
class [[nodiscard]] SaveOnHost final {
 public:
  /// The bytes of all transfers so far. A tensor that is saved several times counts once.
  struct Report {
    int64_t bytes_out = 0;      ///< copied to the host, or written to the file
    int64_t bytes_back = 0;     ///< brought back for backward
    int64_t bytes_kept = 0;     ///< not moved, because of the cap or a write that failed
    int64_t failed_writes = 0;  ///< tensors that stayed in memory because the file could not take them
    std::string failure = {};   ///< the reason of the last failed write

    /// A text for people: one line, or two lines if a write failed.
    std::string str() const;
  };

  explicit SaveOnHost(OffloadOptions options = {});
  ~SaveOnHost();
  SaveOnHost(const SaveOnHost&) = delete;
  SaveOnHost& operator=(const SaveOnHost&) = delete;

  /// The bytes of all offloaded tensors so far.
  Report report() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace snug
