#include "src/distributed/same_model.h"

#include <algorithm>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "snug/core.h"

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
  const at::Tensor lengths = group.all_gather(at::full({1}, static_cast<int64_t>(text.size()), at::kLong));
  const at::Tensor bytes = at::zeros({lengths.max().item<int64_t>()}, at::kByte);
  std::copy(text.begin(), text.end(), bytes.mutable_data_ptr<uint8_t>());
  const at::Tensor all = group.all_gather(bytes);
  std::vector<std::string> result;
  for (int64_t rank = 0; rank < group.size(); ++rank) {
    const at::Tensor row = all[rank];
    const auto* first = row.const_data_ptr<uint8_t>();
    result.emplace_back(first, first + lengths[rank].item<int64_t>());
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
