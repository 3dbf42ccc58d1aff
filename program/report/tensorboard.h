#pragma once
// TensorBoardFile: the numbers of a run for TensorBoard, beside the run log.
//
//   snug::TensorBoardFile board("boards/first");
//   board.write({.step = 1, .loss = 4.2, .learning_rate = 3e-4});          // then: tensorboard --logdir boards
//
// An event file has records of length, checksum of the length, data, checksum of the data (numbers little-endian; the
// checksums are CRC-32C, rotated and shifted by a constant). The data are protobuf messages. Sources:
// tensorflow/core/lib/io/record_writer.h ("Format of a single record"), tensorflow/tsl lib/hash/crc32c.h (the mask),
// tensorboard/compat/proto/event.proto and summary.proto.

#include <cstdint>
#include <filesystem>

#include "program/report/run_log.h"
#include "src/core/file_system.h"

namespace snug {

class TensorBoardFile {
 public:
  /// Begins a new file in `folder`, and makes the folder if the folder does not exist. Existing files stay. TensorBoard
  /// shows all files of a folder as one run; from the first step written to this file on, TensorBoard shows the steps
  /// of this file. Throws Error if the file cannot be made.
  explicit TensorBoardFile(const std::filesystem::path& folder, detail::FileSystem& files = detail::FileSystem::real());
  ~TensorBoardFile();
  TensorBoardFile(const TensorBoardFile&) = delete;
  TensorBoardFile& operator=(const TensorBoardFile&) = delete;

  /// Appends the record's numbers at the record's step, as FP32, the type that TensorBoard keeps (infinite beyond
  /// FP32's range). The numbers are handed to the operating system when write() returns, so that a kill loses nothing.
  /// Numbers that the record lacks are left out. Throws Error (disk full ...), as RunLog does.
  void write(const StepRecord& record);

  /// The file that is written.
  const std::filesystem::path& path() const { return path_; }

 private:
  TensorBoardFile() = default;
  void create(const std::filesystem::path& folder, int64_t time);
  void append(std::string_view event);

  std::filesystem::path path_;
  int file_ = -1;
  bool has_begun_ = false;
};

}  // namespace snug
