#include "program/datasets/text_corpus.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <system_error>

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "program/datasets/data_files.h"
#include "program/datasets/evenly_spread.h"
#include "snug/core.h"
#include "snug/sampler.h"

namespace snug {
namespace {

namespace fs = std::filesystem;

// A file and the division of the file's tokens.
struct Source {
  fs::path path;
  int64_t train;
  int64_t validation;
};

[[noreturn]] void fail(const fs::path& path, const std::string& what) {
  throw ConfigError(fmt::format("TextCorpus.load: {} {}", path.string(), what));
}

int64_t bytes_of(TokenType type) { return type == TokenType::Byte ? 1 : 2; }

at::Tensor new_tokens(int64_t size, TokenType type) {
  return at::empty({size}, at::TensorOptions(at::kCPU).dtype(type == TokenType::Byte ? at::kByte : at::kUInt16));
}

void read(std::ifstream& file, const Source& source, char* target, int64_t bytes) {
  if (!file.read(target, bytes)) {
    fail(source.path, "cannot be read to its end; did it change meanwhile?");
  }
}

template <class Token>
void copy_windows(std::span<const int64_t> starts, int64_t length, const Token* tokens, int64_t* input,
                  int64_t* target) {
  for (const int64_t start : starts) {
    input = std::copy_n(tokens + start, length, input);
    target = std::copy_n(tokens + start + 1, length, target);
  }
}

std::string describe(const std::vector<fs::path>& paths) {
  return paths.front().string() + (paths.size() == 1 ? "" : fmt::format(" and {} more", paths.size() - 1));
}

const char* name_of(Split split) { return split == Split::Train ? "training" : "validation"; }

}  // namespace

TextCorpus::TextCorpus(at::Tensor train, at::Tensor validation, std::string source)
    : train_(std::move(train)), validation_(std::move(validation)), source_(std::move(source)) {}

TextCorpus TextCorpus::load(const std::vector<fs::path>& paths, double validation_fraction, const fs::path& left_out,
                            TokenType type) {
  if (paths.empty()) {
    throw ConfigError("TextCorpus.load: no paths are given; give files or folders with text");
  }
  if (!(validation_fraction >= 0 && validation_fraction < 1)) {
    throw ConfigError(fmt::format("TextCorpus.load: validation_fraction is {}; give one from 0 to below 1, such as 0.1",
                                  validation_fraction));
  }
  std::vector<Source> sources;
  int64_t train_size = 0;
  int64_t validation_size = 0;
  for (const fs::path& path : detail::data_files(paths, left_out)) {
    const auto file_bytes = static_cast<int64_t>(fs::file_size(path));
    if (file_bytes % bytes_of(type) != 0) {
      fail(path, fmt::format("has {} bytes, which are no whole tokens of 16 bits; give files of uint16", file_bytes));
    }
    const int64_t size = file_bytes / bytes_of(type);
    const auto held_out = static_cast<int64_t>(std::floor(static_cast<double>(size) * validation_fraction));
    sources.push_back({path, size - held_out, held_out});
    train_size += size - held_out;
    validation_size += held_out;
  }
  if (validation_fraction > 0 && validation_size == 0) {
    fail(describe(paths),
         fmt::format("has only {} tokens, too few to hold out a fraction of {}", train_size, validation_fraction));
  }
  TextCorpus corpus(new_tokens(train_size, type), new_tokens(validation_size, type), describe(paths));
  auto* train = static_cast<char*>(corpus.train_.mutable_data_ptr());
  auto* validation = static_cast<char*>(corpus.validation_.mutable_data_ptr());
  for (const Source& source : sources) {
    std::ifstream file(source.path, std::ios::binary);
    if (!file) {
      fail(source.path, "cannot be opened; is reading it allowed?");
    }
    const int64_t of_train = source.train * bytes_of(type), of_validation = source.validation * bytes_of(type);
    read(file, source, train, of_train);
    read(file, source, validation, of_validation);
    train += of_train;
    validation += of_validation;
  }
  return corpus;
}

int64_t TextCorpus::train_size() const { return train_.numel(); }
int64_t TextCorpus::validation_size() const { return validation_.numel(); }

const at::Tensor& TextCorpus::tokens(Split split) const { return split == Split::Train ? train_ : validation_; }

int64_t TextCorpus::number_of_windows(int64_t length, Split split) const {
  const int64_t size = tokens(split).numel();
  if (length < 1) {
    throw ConfigError(fmt::format("TextCorpus: a window of {} tokens; give at least 1", length));
  }
  if (length >= size) {
    throw ConfigError(
        fmt::format("TextCorpus: the {} part of {} has {} tokens, too few for a window of {} and "
                    "its last target; give more text",
                    name_of(split), source_, size, length));
  }
  return size - length;
}

std::pair<at::Tensor, at::Tensor> TextCorpus::windows(std::span<const int64_t> starts, int64_t length,
                                                      Split split) const {
  const int64_t limit = number_of_windows(length, split);
  const auto options = at::TensorOptions(at::kCPU).dtype(at::kLong);
  const auto rows = static_cast<int64_t>(starts.size());
  at::Tensor input = at::empty({rows, length}, options);
  at::Tensor target = at::empty({rows, length}, options);
  for (const int64_t start : starts) {
    if (start < 0 || start >= limit) {
      throw ConfigError(fmt::format("TextCorpus.windows: start {} is not in [0, {})", start, limit));
    }
  }
  auto* to_input = input.mutable_data_ptr<int64_t>();
  auto* to_target = target.mutable_data_ptr<int64_t>();
  const at::Tensor& all = tokens(split);
  if (all.scalar_type() == at::kByte) {
    copy_windows(starts, length, all.const_data_ptr<uint8_t>(), to_input, to_target);
  } else {
    copy_windows(starts, length, all.const_data_ptr<uint16_t>(), to_input, to_target);
  }
  return {std::move(input), std::move(target)};
}

std::vector<int64_t> TextCorpus::evenly_spread(int64_t count, int64_t length, Split split) const {
  if (count < 1) {
    throw ConfigError(fmt::format("TextCorpus.evenly_spread: {} windows asked for; give at least 1", count));
  }
  return detail::evenly_spread(count, number_of_windows(length, split));
}

}  // namespace snug
