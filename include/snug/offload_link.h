#pragma once
// OffloadLink: where the tensors of a step may go while nothing needs them, and the speed. See measure_offload_link in
// offload.h.

#include <cstdint>
#include <string>

namespace snug {

/// A file or memory to which storages may leave while nothing needs them, and the speed. The default link has speed 0
/// and is closed: nothing can leave.
struct OffloadLink {
  enum class Kind : uint8_t {
    File,    ///< a file, for storages in the host's memory
    Pinned,  ///< pinned memory of the host, for storages on a device
  };

  Kind kind = Kind::File;
  /// Directory of the file. A directory in memory (tmpfs) frees nothing. Empty: the system's temporary directory.
  std::string directory = {};
  double out_bytes_per_second = 0;
  double back_bytes_per_second = 0;
  double seconds = 0;  ///< of each transfer, in addition to the seconds of the bytes

  /// Whether storages can go over the link.
  bool is_open() const { return out_bytes_per_second > 0 && back_bytes_per_second > 0; }
  /// The time of a single transfer of so many bytes: out, and back.
  double out_seconds(int64_t bytes) const { return seconds + static_cast<double>(bytes) / out_bytes_per_second; }
  double back_seconds(int64_t bytes) const { return seconds + static_cast<double>(bytes) / back_bytes_per_second; }

  friend bool operator==(const OffloadLink&, const OffloadLink&) = default;
};

}  // namespace snug
