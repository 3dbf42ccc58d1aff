#pragma once
// RunData: the samples of a run: windows of text, or rows of tensors in .safetensors files.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "program/datasets/text_corpus.h"
#include "program/run/config.h"
#include "snug/accumulation.h"
#include "snug/exported/exported_module.h"

namespace snug::detail {

class RunData {
 public:
  virtual ~RunData() = default;

  /// At least 1. Throws ConfigError if the split has no samples.
  virtual int64_t samples(Split split) const = 0;
  /// The tensors of the model's inputs, on the CPU, with a row for each of `samples`.
  virtual Batch batch(std::span<const int64_t> samples, Split split) const = 0;
  /// The checksum of all bytes of the data: a run on other data is another run, even with the same number of samples.
  virtual int64_t checksum() const = 0;
};

/// Data for config.model with `inputs`, from config.data. The folder config.out is skipped.
/// - For an exported model, if .safetensors files are among the files, these are the data, and other files are left
///   out. Each .safetensors file has a tensor for every input, under the input's name, with samples along dimension 0.
///   The last tenth of each file is held out.
/// - Otherwise, for inputs of tokens, all files are .bin, tokens of 16 bits, or all are text: see TextCorpus.
///
/// All data are read into memory. Throws ConfigError for data that do not fit the inputs, and for .bin beside text.
/// Throws CorruptFile for damaged files.
std::unique_ptr<RunData> load_run_data(const TrainConfig& config, const std::vector<ExportedModule::Input>& inputs);

}  // namespace snug::detail
