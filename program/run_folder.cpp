#include "program/run_folder.h"

#include <fmt/format.h>

#include "program/report/html_report.h"
#include "program/run/config.h"
#include "program/run/run_model.h"
#include "program/run/trainer.h"
#include "program/shell.h"
#include "snug/core.h"
#include "snug/safetensors.h"
#include "snug/snapshot.h"
#include "src/core/file_system.h"

namespace snug::cli {
namespace {

// The last folder's name, also for "runs/a/" and for ".".
std::string name_of(const std::filesystem::path& out) {
  const auto whole = std::filesystem::absolute(out).lexically_normal();
  return (whole.has_filename() ? whole : whole.parent_path()).filename().string();
}

}  // namespace

void add_run(CLI::App& command, std::string& run) {
  const auto add = [&](const char* name) {
    return command.add_option(name, run, "Run folder of snug train (default run)")->type_name("DIR");
  };
  add("--run")->excludes(add("folder"));
}

std::string resume_command(const std::filesystem::path& out) {
  return fmt::format("snug train --resume --out {}", shell_quoted(out.string()));
}

RunHistory read_run(const std::filesystem::path& out) {
  const auto path = Trainer::log_path(out);
  if (!detail::FileSystem::real().exists(path)) {
    throw ConfigError(fmt::format("there is no run in '{}': {} is missing; give the folder that snug train --out made",
                                  out.string(), path.string()));
  }
  return read_run_log(path);
}

std::string item_of(const RunHistory& run) {
  const LogValue* model = find_value(run.settings, "model");
  const auto* name = model == nullptr ? nullptr : std::get_if<std::string>(model);
  return std::string(item_name(name == nullptr ? "" : *name));
}

Gpt load_model(const std::filesystem::path& out) {
  const TrainConfig config = TrainConfig::from_settings(read_run(out).settings, out);
  if (is_exported(config.model)) {
    throw ConfigError(
        fmt::format("the run in '{}' trained {}, which is no GPT of snug; load its weights in Python, or with "
                    "load_exported",
                    out.string(), config.model));
  }
  const auto path = Trainer::model_path(out);
  if (!detail::FileSystem::real().exists(path)) {
    throw ConfigError(fmt::format("the run in '{}' has no {} yet; finish it with {}", out.string(),
                                  path.filename().string(), resume_command(out)));
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
  detail::FileSystem& files = detail::FileSystem::real();
  if (sample.empty() && files.exists(sample_path(out))) {
    sample = files.read_file(sample_path(out));
  }
  const RunHistory run = read_run(out);
  const std::string page = html_report(run, {.title = name_of(out), .sample = std::move(sample), .item = item_of(run)});
  detail::replace_file(report_path(out), page);
}

}  // namespace snug::cli
