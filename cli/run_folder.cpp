#include "cli/run_folder.h"

#include <array>
#include <string_view>

#include <fmt/format.h>

#include "snug/core/error.h"
#include "snug/core/file_system.h"
#include "snug/io/safetensors.h"
#include "snug/io/stateful.h"
#include "snug/report/html_report.h"
#include "snug/train/config.h"
#include "snug/train/trainer.h"

namespace snug::cli {

RunHistory read_run(const std::filesystem::path& out) {
  const auto path = Trainer::log_path(out);
  if (!FileSystem::real().exists(path)) {
    throw ConfigError(fmt::format("there is no run in '{}': {} is missing; give the folder that snug train --out made",
                                  out.string(), path.string()));
  }
  return read_run_log(path);
}

Gpt load_model(const std::filesystem::path& out) {
  const TrainConfig config = TrainConfig::from_settings(read_run(out).settings, out);
  const auto path = Trainer::model_path(out);
  if (!FileSystem::real().exists(path)) {
    throw ConfigError(fmt::format("the run in '{}' has no {} yet; finish it with snug train --resume --out {}",
                                  out.string(), path.filename().string(), out.string()));
  }
  Gpt model(gpt_configuration(config.model));
  StateDict state;
  for (const auto& [name, tensor] : load_safetensors(path)) {
    state.set(name, tensor);
  }
  stateful(model).load(state);
  return model;
}

std::filesystem::path report_path(const std::filesystem::path& out) { return out / "report.html"; }
std::filesystem::path sample_path(const std::filesystem::path& out) { return out / "sample.txt"; }

void write_report(const std::filesystem::path& out, std::string sample) {
  FileSystem& files = FileSystem::real();
  if (sample.empty() && files.exists(sample_path(out))) {
    sample = files.read_file(sample_path(out));
  }
  const std::string page = html_report(read_run(out), {.title = out.filename().string(), .sample = std::move(sample)});
  const auto temporary = out / "report.html.tmp";
  files.write_file(temporary, std::array<std::string_view, 1>{page});
  files.rename(temporary, report_path(out));
}

}  // namespace snug::cli
