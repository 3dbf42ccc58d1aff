#pragma once
// TextCorpus: text as tokens, from any files and folders, with a part of each file held out. A token is a byte, with a
// vocabulary of 256, or a number of 16 bits written by a tokenizer.
//
//   auto corpus = snug::TextCorpus::load({"plays/", "sonnets.txt"});
//   snug::Sampler sampler(corpus.number_of_windows(128, snug::Split::Train), /*seed=*/7);
//   auto [input, target] = corpus.windows(sampler.next(64), 128, snug::Split::Train);

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace snug {

enum class Split { Train, Validation };

enum class TokenType {
  Byte,    ///< any text
  UInt16,  ///< only little-endian numbers, as in files of numpy's tofile(), and in nanoGPT's train.bin
};

/// The last `validation_fraction` of the tokens of EACH file is held out, so that every file is
/// represented in both parts. The training text is the files' first parts, joined in order, and
/// the validation text is their held-out parts, joined in order: a window may run from one file
/// into the next, but no training window ever holds a held-out token.
class TextCorpus {
 public:
  /// Reads the files in the given order. For a folder, reads all regular files in the folder and below, sorted by path,
  /// and skips empty files. A folder `left_out` below a folder is skipped, because files that a program writes are not
  /// text of the corpus. Throws ConfigError:
  /// - naming the path, if the path is missing, unreadable, an empty file or a folder without text;
  /// - naming the path and the size, if the size is not a multiple of a token's size;
  /// - if validation_fraction is not in [0, 1);
  /// - if all the text is too short to hold anything out.
  static TextCorpus load(const std::vector<std::filesystem::path>& paths, double validation_fraction = 0.1,
                         const std::filesystem::path& left_out = {}, TokenType type = TokenType::Byte);

  /// The number of tokens.
  int64_t train_size() const;
  int64_t validation_size() const;

  /// The number of starts of a window of `length` tokens: 0, 1, ... (windows overlap). A window needs one token more
  /// than `length`, for the last target. Throws ConfigError if the text has no start, or if length is below 1.
  int64_t number_of_windows(int64_t length, Split split) const;

  /// Input and target, each int64 [starts.size(), length] on the CPU: row i of the input is the
  /// `length` tokens from starts[i] on, the target is the same, one token further. Throws ConfigError
  /// for a start outside [0, number_of_windows).
  std::pair<at::Tensor, at::Tensor> windows(std::span<const int64_t> starts, int64_t length, Split split) const;

  /// `count` starts, spread evenly from the first window to the last: the same starts at every call, so that losses can
  /// be compared. All windows, if the split has no more than `count` windows.
  std::vector<int64_t> evenly_spread(int64_t count, int64_t length, Split split) const;

  /// All the tokens of a split: uint8 or uint16 [size].
  const at::Tensor& tokens(Split split) const;

 private:
  TextCorpus(at::Tensor train, at::Tensor validation, std::string source);

  at::Tensor train_;
  at::Tensor validation_;
  std::string source_;  // for messages: "plays/ and 2 more"
};

}  // namespace snug
