#include "program/run/run_folder.h"

#include <algorithm>
#include <string>

#include "program/run/folder_lock.h"
#include "program/run/settings.h"
#include "program/run/trainer.h"
#include "src/core/file_system.h"
#include "src/core/unnamed_file.h"

namespace snug::detail {

bool holds_something(const std::filesystem::path& out) {
  const FileSystem& files = FileSystem::real();
  if (!files.exists(out) || !std::filesystem::is_directory(out)) {
    return files.exists(out);
  }
  const auto names = files.list(out);
  return !std::all_of(names.begin(), names.end(), [&](const std::string& name) {
    return name == Trainer::plan_folder(out).filename() || name == FolderLock::file(out).filename() ||
           is_unfinished(name, Trainer::log_path(out)) || name.starts_with(kUnnamedPrefix);
  });
}

void remove_rest_of_a_kill(const std::filesystem::path& out) {
  for (const auto& file : {Trainer::log_path(out), Trainer::plan_path(out), Trainer::model_path(out)}) {
    remove_unfinished(file);
  }
  for (const std::string& name : FileSystem::real().list(out)) {
    if (name.starts_with(kUnnamedPrefix)) {
      FileSystem::real().remove_all(out / name);
    }
  }
}

RunLog resume_log(const TrainConfig& config, int64_t step) {
  remove_rest_of_a_kill(config.out);
  LogValues changed;
  for (const Setting& setting : settings()) {
    if (setting.may_change_on_resume) {
      changed.emplace_back(setting.name, setting.get(config));
    }
  }
  return RunLog::resume(Trainer::log_path(config.out), step, FileSystem::real(), changed);
}

RunLog cut_log(const TrainConfig& config, int64_t step) {
  remove_rest_of_a_kill(config.out);
  return RunLog::resume(Trainer::log_path(config.out), step);
}

std::optional<double> logged_validation_loss(const std::filesystem::path& out, int64_t step) {
  const RunHistory history = read_run_log(Trainer::log_path(out));
  const auto record = std::find_if(history.records.begin(), history.records.end(),
                                   [&](const StepRecord& one) { return one.step == step; });
  return record == history.records.end() ? std::nullopt : record->validation_loss;
}

}  // namespace snug::detail
