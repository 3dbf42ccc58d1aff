// The targets that need no torch.

#include <algorithm>
#include <filesystem>
#include <string>
#include <utility>
#include <variant>

#include <fmt/format.h>

#include "program/report/html_report.h"
#include "program/report/run_log_parse.h"
#include "snug/core.h"
#include "src/distributed/launch_environment.h"
#include "src/exported/zip_archive.h"
#include "src/io/manifest.h"
#include "src/io/safetensors_header.h"
#include "src/io/safetensors_index.h"
#include "src/planner/search.h"
#include "tests/fuzz/bytes_as_file.h"
#include "tests/fuzz/same.h"
#include "tests/fuzz/targets.h"

namespace snug::fuzz {
namespace {

void read_bytes(std::string_view text) {
  const Bytes bytes = Bytes::parse(text);
  require_same(bytes.count() >= 0 &&
               Bytes::parse(bytes.is_unlimited() ? "unlimited" : fmt::format("{}", bytes.count())) == bytes);
}

// Lines of NAME=value, as `env` prints them.
void read_environment(std::string_view text) {
  detail::Environment environment;
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    const size_t equals = line.find('=');
    if (equals != std::string_view::npos) {
      environment[std::string(line.substr(0, equals))] = line.substr(equals + 1);
    }
    text.remove_prefix(std::min(text.size(), line.size() + 1));
  }
  const detail::LaunchPlace place = detail::read_launch_environment(environment);
  require_same(place.rank >= 0 && place.rank < place.size && place.local_rank >= 0);
}

void read_manifest(std::string_view text) {
  const detail::Manifest manifest = detail::parse_manifest(std::string(text), "folder");
  const std::string written = detail::format_manifest(manifest);
  require_same(detail::format_manifest(detail::parse_manifest(written, "folder")) == written);
}

template <class T>
void read_json(std::string_view text) {
  const T read = T::from_json(text);
  const std::string written = read.to_json();
  require_same(T::from_json(written).to_json() == written);
}

void read_profile(std::string_view text) {
  read_json<plan::Profile>(text);
  const plan::Profile profile = plan::Profile::from_json(text);
  plan::Simulator(profile).run(plan::keep_all(profile));
}

void read_log(std::string_view text) {
  RunHistory history;
  for (detail::LogLine& line : detail::parse_run_log(text, "log.jsonl")) {
    if (auto* record = std::get_if<StepRecord>(&line.entry)) {
      history.records.push_back(std::move(*record));
    } else if (auto* event = std::get_if<RunEvent>(&line.entry)) {
      history.events.push_back(std::move(*event));
    } else {
      history.settings = std::get<LogValues>(line.entry);
    }
  }
  html_report(history);
}

void read_safetensors(std::string_view file) {
  const auto size = static_cast<int64_t>(file.size());
  const int64_t length = detail::parse_safetensors_length(file.substr(0, 8), size, "file");
  const auto json = file.substr(detail::kSafetensorsPrefix, static_cast<size_t>(length));
  const int64_t data = size - detail::kSafetensorsPrefix - length;
  const detail::SafetensorsHeader header = detail::parse_safetensors_header(json, data, "file");
  const std::string written = detail::format_safetensors_header(header, "file");
  const auto again =
      detail::parse_safetensors_header(std::string_view(written).substr(detail::kSafetensorsPrefix), data, "file");
  require_same(detail::format_safetensors_header(again, "file") == written);
}

// No shard is outside the index's folder, and the tensors that the index names in one are just those that it must have.
void read_index(std::string_view text) {
  const detail::SafetensorsIndex index = detail::parse_safetensors_index(text, "file");
  for (const auto& [shard, names] : index.shards) {
    const std::filesystem::path path = std::filesystem::path("folder") / shard;
    require_same(path.lexically_normal().parent_path() == "folder" && path.filename() == shard && !names.empty());
    detail::SafetensorsHeader header;
    for (const std::string& name : names) {
      header.tensors.push_back({.name = name, .dtype = "U8", .shape = {0}});
    }
    detail::check_shard(index, shard, header, "file");
  }
}

void read_zip(std::string_view bytes) {
  const BytesAsFile file(bytes);
  const detail::ZipArchive archive(file.path());
  for (const std::string& name : archive.names()) {
    require_same(archive.size(name) <= std::ssize(bytes));
    archive.text(name, std::ssize(bytes));
  }
}

}  // namespace

const std::map<std::string_view, Target>& targets() {
  static const std::map<std::string_view, Target> all{
      {"bytes", read_bytes},     {"choice", read_json<plan::Choice>}, {"environment", read_environment},
      {"log", read_log},         {"manifest", read_manifest},         {"plan", read_json<plan::Solution>},
      {"profile", read_profile}, {"safetensors", read_safetensors},   {"safetensors_index", read_index},
      {"zip", read_zip},
  };
  return all;
}

}  // namespace snug::fuzz
