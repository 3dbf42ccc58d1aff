#include "program/report/tensorboard.h"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "program/report/appending.h"
#include "program/report/record_fields.h"
#include "src/core/file_system.h"

namespace snug {
namespace {

using Seconds = std::chrono::duration<double>;

// --- Records.

template <class T>
void put_little_endian(std::string& out, T bits) {
  for (size_t byte = 0; byte < sizeof(T); ++byte) {
    out += static_cast<char>((bits >> (8 * byte)) & 0xff);
  }
}

// CRC-32C (Castagnoli 1993), bit by bit: a record has some hundred bytes.
uint32_t masked_checksum(std::string_view bytes) {
  uint32_t crc = ~uint32_t{0};
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82f63b78u : 0);
    }
  }
  return std::rotr(~crc, 15) + 0xa282ead8u;
}

std::string record_of(std::string_view data) {
  std::string record;
  put_little_endian<uint64_t>(record, data.size());
  put_little_endian(record, masked_checksum(record));
  record += data;
  put_little_endian(record, masked_checksum(data));
  return record;
}

// --- Messages: a key of field number and kind before each value.

enum Kind : unsigned { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

void put_varint(std::string& out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) {
    out += static_cast<char>((value & 0x7f) | 0x80);
  }
  out += static_cast<char>(value);
}

void put_key(std::string& out, unsigned field, Kind kind) { put_varint(out, (field << 3) | kind); }

void put_bytes(std::string& out, unsigned field, std::string_view bytes) {
  put_key(out, field, kBytes);
  put_varint(out, bytes.size());
  out += bytes;
}

enum EventField : unsigned { kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5, kSessionLog = 7 };

std::string event_of(int64_t step, EventField what, std::string_view content) {
  const double now = Seconds(std::chrono::system_clock::now().time_since_epoch()).count();
  std::string event;
  put_key(event, kWallTime, kFixed64);
  put_little_endian(event, std::bit_cast<uint64_t>(now));
  put_key(event, kStep, kVarint);
  put_varint(event, static_cast<uint64_t>(step));
  put_bytes(event, what, content);
  return event;
}

// Infinite beyond the range of FP32, because a cast of such a number is undefined.
float single(double number) {
  using Limits = std::numeric_limits<float>;
  if (std::abs(number) > Limits::max()) {
    return number > 0 ? Limits::infinity() : -Limits::infinity();
  }
  return static_cast<float>(number);
}

using Scalars = std::vector<std::pair<std::string_view, double>>;

std::string summary_of(const Scalars& scalars) {
  std::string summary;
  for (const auto& [tag, number] : scalars) {
    std::string value;
    put_bytes(value, 1, tag);
    put_key(value, 2, kFixed32);
    put_little_endian(value, std::bit_cast<uint32_t>(single(number)));
    put_bytes(summary, 1, value);
  }
  return summary;
}

// Collects a record's numbers: numbers of every record, and numbers of some records only.
struct FieldScalars {
  Scalars& always;
  Scalars& sometimes;

  void operator()(detail::RecordField field, double value) const {
    if (field.tag != nullptr) {
      always.emplace_back(field.tag, value);
    }
  }
  void operator()(detail::RecordField field, int64_t value) const { (*this)(field, static_cast<double>(value)); }
  void operator()(detail::RecordField field, bool is_stepped) const { (*this)(field, is_stepped ? 0.0 : 1.0); }
  template <detail::FieldGroup Group>
  void operator()(detail::RecordField /*field*/, const Group& group) const {
    detail::visit_fields(group, *this);
  }
  template <class T>
  void operator()(detail::RecordField field, const std::optional<T>& value) const {
    if (value) {
      FieldScalars{sometimes, sometimes}(field, *value);
    }
  }
};

Scalars scalars_of(const StepRecord& record) {
  Scalars scalars;
  Scalars sometimes;
  detail::visit_fields(record, FieldScalars{scalars, sometimes});
  scalars.insert(scalars.end(), sometimes.begin(), sometimes.end());
  return scalars;
}

// --- Names: TensorBoard reads the files of a folder in the order of the files' names. A name begins with the second of
// the file's creation.

constexpr std::string_view kPrefix = "events.out.tfevents.";
constexpr int64_t kEndOfTime = 9'999'999'999;  // ten digits; a later time is not a time but another number

int64_t time_in(std::string_view name) {
  int64_t time = 0;
  if (name.starts_with(kPrefix)) {
    name.remove_prefix(kPrefix.size());
    std::from_chars(name.data(), name.data() + name.size(), time);
  }
  return time < kEndOfTime ? time : 0;
}

// A time after the times of all existing files.
int64_t new_time(const std::filesystem::path& folder, const detail::FileSystem& files) {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  int64_t time = std::chrono::duration_cast<std::chrono::seconds>(now).count();
  for (const std::string& name : files.list(folder)) {
    time = std::max(time, time_in(name) + 1);
  }
  return time;
}

}  // namespace

// Delegates, so that the destructor closes the file after any exception in this constructor.
TensorBoardFile::TensorBoardFile(const std::filesystem::path& folder, detail::FileSystem& files) : TensorBoardFile() {
  try {
    files.create_directories(folder);
    create(folder, new_time(folder, files));
  } catch (const Error& error) {
    throw Error(fmt::format("TensorBoardFile: no event file can be made in {}: {}; give a folder that can be written",
                            folder.string(), error.what()));
  }
}

void TensorBoardFile::create(const std::filesystem::path& folder, int64_t time) {
  // Another run may have begun in this folder within the same second.
  for (; file_ < 0; ++time) {
    path_ = folder / fmt::format("{}{:010}.snug", kPrefix, time);
    file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_APPEND | O_CLOEXEC, 0666);
    if (file_ < 0 && errno != EEXIST) {
      throw detail::system_error("open", path_, errno);
    }
  }
  try {
    append(event_of(0, kFileVersion, "brain.Event:2"));
  } catch (...) {
    ::unlink(path_.c_str());
    throw;
  }
}

TensorBoardFile::~TensorBoardFile() {
  if (file_ >= 0) {
    ::close(file_);
  }
}

void TensorBoardFile::write(const StepRecord& record) {
  if (!has_begun_) {
    // SessionLog.START makes void the values of this step and later steps in earlier files, as when a run goes on from
    // an earlier snapshot.
    std::string start;
    put_key(start, 1, kVarint);
    put_varint(start, 1);
    append(event_of(record.step, kSessionLog, start));
    has_begun_ = true;
  }
  append(event_of(record.step, kSummary, summary_of(scalars_of(record))));
}

void TensorBoardFile::append(std::string_view event) {
  detail::append_whole(file_, record_of(event), "TensorBoardFile", path_);
}

}  // namespace snug
