// The targets that need torch.

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "program/report/run_log_parse.h"
#include "program/run/config.h"
#include "snug/core.h"
#include "snug/exported/exported_module.h"
#include "src/io/state_json.h"
#include "tests/exported/zip_bytes.h"
#include "tests/fuzz/bytes_as_file.h"
#include "tests/fuzz/same.h"
#include "tests/fuzz/targets.h"

namespace snug::fuzz {
namespace {

// Records of the archive, each after a line "--- NAME" (the first one anywhere), so that the archive's checksums are
// right whatever is in them.
std::vector<testing::ZipRecord> records_of(std::string_view text) {
  constexpr std::string_view kBegin = "--- ";
  std::vector<testing::ZipRecord> records;
  for (size_t at = text.find(kBegin); at != std::string_view::npos;) {
    const size_t name_end = std::min(text.find('\n', at), text.size());
    const size_t next = text.find(fmt::format("\n{}", kBegin), name_end);
    const size_t begin = std::min(name_end + 1, text.size()), end = std::max(begin, std::min(next, text.size()));
    records.push_back({.name = fmt::format("model/{}", text.substr(at + kBegin.size(), name_end - at - kBegin.size())),
                       .data = std::string(text.substr(begin, end - begin))});
    at = next == std::string_view::npos ? next : next + 1;
  }
  return records;
}

// The graph is read, and not run: operators do what they are asked for, whatever memory it takes.
void read_exported(std::string_view text) {
  const BytesAsFile file(testing::zip_of(records_of(text)));
  const auto model = load_exported(file.path());
  require_same(!model->output_names().empty());
}

// A run's log; its settings are in the first line.
void read_settings(std::string_view text) {
  for (const detail::LogLine& line : detail::parse_run_log(text, "log.jsonl")) {
    if (const auto* saved = std::get_if<LogValues>(&line.entry)) {
      const TrainConfig config = TrainConfig::from_settings(*saved, "out");
      const LogValues written = config.to_settings();
      require_same(TrainConfig::from_settings(written, "out").to_settings() == written);
    }
  }
}

// What a part of a snapshot says of its tensors and numbers.
void read_state(std::string_view text) {
  const std::string structure(text);
  std::map<std::string, at::Tensor> tensors;
  for (const std::string& name : detail::tensor_names(structure, "part")) {
    tensors.emplace(name, at::empty({0}));
  }
  const detail::FlatState written = detail::flatten(detail::unflatten(structure, tensors, "part"), "part");
  const detail::FlatState again = detail::flatten(detail::unflatten(written.structure, tensors, "part"), "part");
  require_same(written.tensors.size() == tensors.size() && again.structure == written.structure &&
               nlohmann::ordered_json::parse(written.structure).size() ==
                   nlohmann::ordered_json::parse(structure).size());
}

}  // namespace

const std::map<std::string_view, Target>& targets() {
  static const std::map<std::string_view, Target> all{
      {"exported", read_exported}, {"settings", read_settings}, {"state", read_state}};
  return all;
}

}  // namespace snug::fuzz
