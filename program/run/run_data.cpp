#include "program/run/run_data.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include <ATen/ops/empty.h>
#include <fmt/format.h>

#include "program/datasets/data_files.h"
#include "program/run/run_model.h"
#include "snug/core.h"
#include "snug/safetensors.h"
#include "src/io/checksum.h"

namespace snug::detail {
namespace {

namespace fs = std::filesystem;

std::string_view bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

class TextData final : public RunData {
 public:
  TextData(TextCorpus corpus, int64_t length, bool has_target)
      : corpus_(std::move(corpus)), length_(length), has_target_(has_target) {}

  int64_t samples(Split split) const override { return corpus_.number_of_windows(length_, split); }
  Batch batch(std::span<const int64_t> samples, Split split) const override {
    auto [input, target] = corpus_.windows(samples, length_, split);
    return has_target_ ? Batch{input, target} : Batch{input};
  }
  int64_t checksum() const override {
    return checksum_of(std::array{bytes_of(corpus_.tokens(Split::Train)), bytes_of(corpus_.tokens(Split::Validation))})
        .crc32;
  }

 private:
  TextCorpus corpus_;
  int64_t length_;
  bool has_target_;
};

// The rows of a file that are in one split.
struct Rows {
  std::vector<at::Tensor> tensors;  // the inputs' tensors, in the order of the inputs
  int64_t begin;                    // the number of the first row in the split
};

class TensorData final : public RunData {
 public:
  TensorData(const std::vector<fs::path>& files, const std::vector<ExportedModule::Input>& inputs) {
    for (const fs::path& file : files) {
      const auto tensors = tensors_of(file, inputs);
      const int64_t rows = tensors.front().size(0), trained = rows - rows / 10;
      add(Split::Train, tensors, 0, trained);
      add(Split::Validation, tensors, trained, rows);
    }
    if (counts_[0] == 0 || counts_[1] == 0) {
      throw ConfigError(fmt::format("data: {} samples are too few to hold out a tenth of each file; give more",
                                    counts_[0] + counts_[1]));
    }
  }

  int64_t samples(Split split) const override { return counts_[index_of(split)]; }

  Batch batch(std::span<const int64_t> samples, Split split) const override {
    std::vector<at::Tensor> result;
    const std::vector<Rows>& parts = parts_[index_of(split)];
    for (size_t input = 0; input < parts.front().tensors.size(); ++input) {
      auto sizes = parts.front().tensors[input].sizes().vec();
      sizes[0] = std::ssize(samples);
      at::Tensor rows = at::empty(sizes, parts.front().tensors[input].options());
      for (int64_t row = 0; row < sizes[0]; ++row) {
        const int64_t sample = samples[static_cast<size_t>(row)];
        const auto after =
            std::upper_bound(parts.begin(), parts.end(), sample, [](int64_t s, const Rows& p) { return s < p.begin; });
        const Rows& part = *std::prev(after);
        rows.select(0, row).copy_(part.tensors[input].select(0, sample - part.begin));
      }
      result.push_back(rows);
    }
    return Batch(std::move(result));
  }

  int64_t checksum() const override {
    std::vector<std::string_view> bytes;
    for (const auto& parts : parts_) {
      for (const Rows& part : parts) {
        std::transform(part.tensors.begin(), part.tensors.end(), std::back_inserter(bytes), bytes_of);
      }
    }
    return checksum_of(bytes).crc32;
  }

 private:
  static size_t index_of(Split split) { return split == Split::Train ? 0 : 1; }

  static std::vector<at::Tensor> tensors_of(const fs::path& file, const std::vector<ExportedModule::Input>& inputs) {
    const auto named = load_safetensors(file);
    std::vector<at::Tensor> tensors;
    for (const ExportedModule::Input& input : inputs) {
      const auto found = named.find(input.name);
      if (found == named.end()) {
        throw ConfigError(
            fmt::format("data: {} has no tensor '{}', which is an input of the model; name the tensors as "
                        "the inputs of the Python model's forward() are",
                        file.string(), input.name));
      }
      check(file, input, found->second, tensors.empty() ? found->second : tensors.front());
      tensors.push_back(found->second);
    }
    return tensors;
  }

  static void check(const fs::path& file, const ExportedModule::Input& input, const at::Tensor& tensor,
                    const at::Tensor& first) {
    const auto refuse = [&](const std::string& why) {
      throw ConfigError(fmt::format("data: {}: tensor '{}' {}", file.string(), input.name, why));
    };
    if (tensor.scalar_type() != *input.dtype) {
      refuse(fmt::format("is {}, and the model takes {}; save it as that", c10::toString(tensor.scalar_type()),
                         c10::toString(*input.dtype)));
    }
    if (tensor.dim() != std::ssize(input.sizes)) {
      refuse(fmt::format("has {} dimensions, and the model takes {}, samples along the first", tensor.dim(),
                         input.sizes.size()));
    }
    for (int64_t dimension = 1; dimension < tensor.dim(); ++dimension) {
      const auto [least, most] = input.sizes[static_cast<size_t>(dimension)];
      if (const int64_t size = tensor.size(dimension); size < least || size > most) {
        refuse(fmt::format("has {} in dimension {}, and the model takes {}", size, dimension,
                           least == most ? std::to_string(least) : fmt::format("{} to {}", least, most)));
      }
    }
    if (tensor.size(0) != first.size(0)) {
      refuse(fmt::format("has {} samples, and the first input {}", tensor.size(0), first.size(0)));
    }
  }

  void add(Split split, const std::vector<at::Tensor>& tensors, int64_t begin, int64_t end) {
    if (begin == end) {
      return;
    }
    auto& parts = parts_[index_of(split)];
    Rows rows{.tensors = {}, .begin = counts_[index_of(split)]};
    for (size_t i = 0; i < tensors.size(); ++i) {
      rows.tensors.push_back(tensors[i].slice(0, begin, end));
      if (rows.tensors[i].sizes().slice(1) != (parts.empty() ? rows : parts.front()).tensors[i].sizes().slice(1)) {
        throw ConfigError("data: files have samples of several sizes; give samples of one size");
      }
    }
    parts.push_back(std::move(rows));
    counts_[index_of(split)] += end - begin;
  }

  std::array<std::vector<Rows>, 2> parts_;
  std::array<int64_t, 2> counts_{};
};

std::vector<fs::path> of_kind(std::vector<fs::path> files, std::string_view extension) {
  std::erase_if(files, [&](const fs::path& file) { return file.extension() != extension; });
  return files;
}

// The .bin files among `files`; empty if all are text. Throws for a mixture: one stray file must not replace all the
// text.
std::vector<fs::path> token_files(const std::vector<fs::path>& files) {
  std::vector<fs::path> tokens = of_kind(files, ".bin");
  const auto other =
      std::find_if(files.begin(), files.end(), [](const fs::path& file) { return file.extension() != ".bin"; });
  if (!tokens.empty() && other != files.end()) {
    throw ConfigError(
        fmt::format("data: {} would be read as tokens, and {} as text; a run takes one or the other: name the files of "
                    "one kind in --data, or give a folder that holds no others",
                    tokens.front().string(), other->string()));
  }
  return tokens;
}

}  // namespace

std::unique_ptr<RunData> load_run_data(const TrainConfig& config, const std::vector<ExportedModule::Input>& inputs) {
  // For a GPT of snug all files are text.
  const std::vector<fs::path> files =
      is_exported(config.model) ? data_files(config.data, config.out) : std::vector<fs::path>();
  if (const auto of_rows = of_kind(files, ".safetensors"); !of_rows.empty()) {
    return std::make_unique<TensorData>(of_rows, inputs);
  }
  if (!takes_tokens(inputs)) {
    throw ConfigError(
        "data: there is no .safetensors among the files, and text and .bin are for models whose inputs are tokens, or "
        "tokens and targets: int64 of one shape [samples, time]; give .safetensors with a tensor for each input");
  }
  const int64_t length = sizes_of(inputs.front(), 1)[1];
  const std::vector<fs::path> tokens = token_files(files);
  TextCorpus corpus = tokens.empty() ? TextCorpus::load(config.data, 0.1, config.out)
                                     : TextCorpus::load(tokens, 0.1, {}, TokenType::UInt16);
  return std::make_unique<TextData>(std::move(corpus), length, inputs.size() == 2);
}

}  // namespace snug::detail
