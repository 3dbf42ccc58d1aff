#include "src/distributed/same_model.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "snug/core.h"
#include "src/distributed/process_group_impl.h"

namespace snug::detail {
namespace {

// Writes one line per tensor: no name has a line break.
std::string describe(const std::string& kind, const DataParallel::NamedTensors& tensors) {
  std::string text;
  for (const auto& [name, tensor] : tensors) {
    text += fmt::format("{} '{}': {} [{}]{}{}\n", kind, name, c10::toString(tensor.scalar_type()),
                        fmt::join(tensor.sizes(), ", "), tensor.layout() == at::kStrided ? "" : ", not dense",
                        kind == "parameter" && !tensor.requires_grad() ? ", frozen" : "");
  }
  return text;
}

std::string line_at(const std::string& text, size_t position) {
  const size_t before = position == 0 ? std::string::npos : text.rfind('\n', position - 1);
  const size_t start = before == std::string::npos ? 0 : before + 1;
  return text.substr(start, text.find('\n', position) - start);
}

}  // namespace

std::vector<std::string> texts_of_all_ranks(ProcessGroup& group, const std::string& text) {
  const auto ranks = static_cast<size_t>(group.size()), own = static_cast<size_t>(group.rank());
  std::vector<int64_t> lengths(ranks);
  lengths[own] = static_cast<int64_t>(text.size());
  all_reduce(group, lengths);
  std::vector<size_t> begins{0};  // of each rank's text, in words
  for (const int64_t length : lengths) {
    begins.push_back(begins.back() + static_cast<size_t>(length) / sizeof(int64_t) + 1);
  }
  std::vector<int64_t> words(begins.back());  // no tensor: a rank without tensor memory must not be missing
  std::memcpy(&words[begins[own]], text.data(), text.size());
  all_reduce(group, words);
  std::vector<std::string> result;
  for (size_t rank = 0; rank < ranks; ++rank) {
    result.emplace_back(reinterpret_cast<const char*>(&words[begins[rank]]), static_cast<size_t>(lengths[rank]));
  }
  return result;
}

void check_same_model(ProcessGroup& group, const std::string& options, const DataParallel::NamedTensors& parameters,
                      const DataParallel::NamedTensors& buffers, const char* where) {
  const auto texts = texts_of_all_ranks(
      group, options + "\n" + describe("parameter", parameters) + describe("buffer", buffers) + "nothing more\n");
  const std::string& first = texts.front();
  for (size_t rank = 1; rank < texts.size(); ++rank) {
    const auto [a, b] = std::mismatch(first.begin(), first.end(), texts[rank].begin(), texts[rank].end());
    if (a != first.end() || b != texts[rank].end()) {
      const auto position = static_cast<size_t>(a - first.begin());
      throw ConfigError(
          fmt::format("{}: ranks differ: rank 0 has {}, rank {} has {}; make the same model in the same way on "
                      "every rank",
                      where, line_at(first, position), rank, line_at(texts[rank], position)));
    }
  }
}

}  // namespace snug::detail
