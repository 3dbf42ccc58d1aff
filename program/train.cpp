// snug train: trains a GPT on text files, or a model of torch.export.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include <fmt/format.h>

#include "program/command.h"
#include "program/progress.h"
#include "program/report/tensorboard.h"
#include "program/run/device.h"
#include "program/run/run_model.h"
#include "program/run/settings.h"
#include "program/run/trainer.h"
#include "program/run_folder.h"
#include "program/signals.h"
#include "program/slow_notice.h"
#include "snug/core.h"
#include "snug/distributed/process_group.h"
#include "src/core/file_system.h"
#include "src/distributed/launch_environment.h"

namespace snug::cli {
namespace {

// The values given on the command line. A resumed run takes the other values from the run's log.
struct TrainFlags {
  std::vector<std::pair<const Setting*, LogValue>> settings;
  std::vector<std::string> data;
  std::optional<std::string> micro_batch;
  std::optional<int64_t> accumulate;
  std::string out = "run", tensorboard;
  double timeout = 1800;
  bool resume = false;
};

// The rank at fault ends first, so that a launcher names the rank at fault.
constexpr auto kAfterYou = std::chrono::milliseconds(500);

// One name for a file, for all spellings of the path: a run may be resumed from another folder, and by another
// spelling.
std::filesystem::path one_name(const std::string& path) {
  std::error_code unreadable;  // a later read of the text gives a better message
  const auto whole = std::filesystem::weakly_canonical(std::filesystem::absolute(path), unreadable);
  return unreadable ? std::filesystem::absolute(path) : whole;
}

int64_t parse_micro_batch(const std::string& text) {
  if (text == "auto") {
    return 0;
  }
  size_t used = 0;
  int64_t value = 0;
  try {
    value = std::stoll(text, &used);
  } catch (const std::exception&) {
    used = 0;
  }
  if (used == 0 || used != text.size() || value < 1) {
    throw ConfigError(fmt::format("train: --micro-batch is '{}'; give a number >= 1, or auto", text));
  }
  return value;
}

int64_t micro_batch_of(int64_t batch, int64_t accumulate, int ranks) {
  if (accumulate < 1 || accumulate > batch / ranks || batch % (accumulate * ranks) != 0) {
    throw ConfigError(fmt::format("train: --accumulate is {}; it must divide the batch of {} on {} rank{}", accumulate,
                                  batch, ranks, ranks == 1 ? "" : "s"));
  }
  return batch / accumulate / ranks;
}

// The ranks that a launcher has started; null: this process is the only rank.
std::shared_ptr<ProcessGroup> join_ranks(double timeout) {
  if (!(timeout > 0)) {
    throw ConfigError(fmt::format("train: --timeout is {}; give seconds, above 0", timeout));
  }
  if (detail::read_launch_environment(detail::process_environment()).size == 1) {
    return nullptr;
  }
  constexpr double kForEver = 1e15;
  return init_process_group(
      {.timeout = std::chrono::milliseconds(static_cast<int64_t>(std::min(1000 * timeout, kForEver)))});
}

// A launcher starts the same command again when a rank has failed. Then the run goes on.
bool is_restarted() {
  const detail::Environment variables = detail::process_environment();
  const auto count = variables.find("TORCHELASTIC_RESTART_COUNT");
  return count != variables.end() && count->second != "0";
}

void apply(const TrainFlags& flags, TrainConfig& config) {
  for (const auto& [setting, value] : flags.settings) {
    setting->set(config, value);
  }
  if (flags.micro_batch) {
    config.micro_batch = parse_micro_batch(*flags.micro_batch);
  }
  if (!flags.data.empty()) {
    config.data.clear();
    for (const std::string& path : flags.data) {
      config.data.push_back(one_name(path));
    }
  }
  if (is_exported(config.model)) {
    config.model = one_name(config.model).string();
  }
  if (flags.accumulate) {
    const int ranks = detail::read_launch_environment(detail::process_environment()).size;
    config.micro_batch = micro_batch_of(config.batch, *flags.accumulate, ranks);
  }
  if (flags.micro_batch && config.micro_batch == 0 && config.checkpoint() != Checkpointing::Auto) {
    throw ConfigError(
        "train: --micro-batch auto chooses what is fastest within a budget; give --memory, and --checkpoint auto");
  }
}

// The run's own settings. Values on the command line must agree with the run's settings, except for settings that may
// change.
TrainConfig resumed_config(const TrainFlags& flags) {
  const TrainConfig saved = TrainConfig::from_settings(read_run(flags.out).settings, flags.out);
  TrainConfig asked = saved;
  apply(flags, asked);
  constexpr std::string_view kModel = "model";
  // A file, identified by its checksum.
  const bool is_moved_model = is_exported(saved.model) && is_exported(asked.model);
  for (const Setting& setting : settings()) {
    const LogValue was = setting.get(saved), is = setting.get(asked);
    if (was != is && !(setting.may_change_on_resume && (setting.name != kModel || is_moved_model))) {
      throw ConfigError(
          fmt::format("train: the run in '{}' was started with {} = {}, not {}; resume it without that flag, or begin "
                      "a new run",
                      flags.out, setting.name, text_of(was), text_of(is)));
    }
  }
  return asked;
}

// For names made by one_name. A name of a file or folder that does not exist yet may end in a slash.
bool is_below(const std::filesystem::path& path, const std::filesystem::path& folder) {
  const auto above = folder.has_filename() ? folder : folder.parent_path();
  return std::mismatch(above.begin(), above.end(), path.begin(), path.end()).first == above.end();
}

// The run folder itself is not read as text.
void check_board(const std::string& board, const TrainConfig& config) {
  for (const auto& data : config.data) {
    std::error_code unreadable;  // loading the text gives a better message
    if (!board.empty() && std::filesystem::is_directory(data, unreadable) && is_below(one_name(board), data) &&
        !is_below(one_name(board), one_name(config.out.string()))) {
      throw ConfigError(
          fmt::format("train: --tensorboard '{}' lies below --data '{}', so what is written there would be text of the "
                      "run when it is resumed; give a folder outside, or in --out",
                      board, data.string()));
    }
  }
}

// The output for TensorBoard. A viewer is not a reason to end a run: if the file can no longer be written, the file is
// given up. The log has the same numbers.
class Board {
 public:
  // The run folder does not exist before the first step is made. A board inside the run folder is not made before the
  // first step either.
  Board(std::filesystem::path folder, const std::filesystem::path& out) : folder_(std::move(folder)) {
    if (!folder_.empty() && !is_below(one_name(folder_.string()), one_name(out.string()))) {
      open();
    }
  }

  void write(const StepRecord& record, Progress& progress) {
    try {
      if (!folder_.empty()) {
        open();
      }
      if (file_) {
        file_->write(record);
      }
    } catch (const Error& error) {
      progress.note(fmt::format("step {}: {}; goes on without TensorBoard", record.step, error.what()));
      folder_.clear();
      file_.reset();
    }
  }

 private:
  void open() { file_.emplace(std::exchange(folder_, {})); }

  std::filesystem::path folder_;  // empty: the file is open, or the run has no board
  std::optional<TensorBoardFile> file_;
};

void run_train(const TrainFlags& flags) {
  TrainConfig config;
  const bool resumes = flags.resume || (is_restarted() && std::filesystem::exists(Trainer::log_path(flags.out)));
  if (resumes) {
    config = resumed_config(flags);
  } else {
    apply(flags, config);
    config.out = flags.out;
  }
  check_board(flags.tensorboard, config);
  if (config.device.starts_with("cuda")) {  // all ranks find out together whether the device exists
    use_growing_segments(c10::kCUDA);
  }
  const auto group = join_ranks(flags.timeout);
  Trainer trainer(config, resumes ? Start::Resume : Start::Fresh, group);
  const bool is_first = !group || group->rank() == 0;
  Board board(is_first ? flags.tensorboard : "", config.out);
  catch_stops(SecondStop::EndsTheProgram);
  ignore_signal(SIGPIPE);
  Progress progress(config.steps, std::string(item_name(config.model)));
  std::optional<SlowNotice> planning;
  if (is_first && config.checkpoint() == Checkpointing::Auto) {
    planning.emplace(fmt::format(
        "train: planning within {} before the first step: micro-batches are tried, and what to recompute is "
        "searched for",
        config.memory.str()));
  }
  if (is_first) {
    detail::remove_unfinished(report_path(config.out));  // removes an unfinished report of a killed run
  }
  const TrainOutcome outcome = trainer.run({
      .on_step =
          [&](const StepRecord& record) {
            planning.reset();
            progress.step(record);
            board.write(record, progress);
          },
      .on_note = [&](const std::string& text) { progress.note(text); },
      .stop_requested = [] { return last_stop() != 0; },
  });
  if (is_first) {
    write_report(config.out, /*sample=*/{});
  }
  if (!outcome.finished) {
    if (is_first) {
      progress.note(
          fmt::format("interrupted after step {}, and saved. Go on with: {}", outcome.step, resume_command(flags.out)));
    }
    throw Interrupted{last_stop() != 0 ? last_stop() : SIGTERM};  // the signal may have come to another rank
  }
  if (!is_first) {
    return;
  }
  progress.note(fmt::format("done: held-out loss {:.4f}{}. Model: {}  Report: {}", outcome.validation_loss,
                            is_exported(config.model) ? "" : " nats per byte", Trainer::model_path(config.out).string(),
                            report_path(config.out).string()));
}

// An option has the type of the setting's value, except for settings whose values have other names on the command line.
void add_setting(CLI::App& command, const Setting& setting, const std::shared_ptr<TrainFlags>& flags) {
  const auto give = [flags, &setting](const auto& value) { flags->settings.emplace_back(&setting, value); };
  const std::string_view name = setting.name;
  if (name == "data") {
    command.add_option(setting.flag, flags->data, setting.help)->type_name(setting.value)->take_all();
  } else if (name == "micro_batch") {
    command.add_option(setting.flag, flags->micro_batch, setting.help)->type_name(setting.value);
  } else if (setting.value[0] == '\0') {
    command.add_flag_function(setting.flag, [give](int64_t count) { give(count > 0); }, setting.help);
  } else if (setting.flag[0] != '\0') {
    const auto add = [&](auto of_type) {
      using T = decltype(of_type);
      command.add_option_function<T>(setting.flag, give, setting.help)->type_name(setting.value);
    };
    std::visit(add, setting.get({}));
  }
}

}  // namespace

void add_train(CLI::App& app) {
  CLI::App* command = app.add_subcommand("train", "Train a GPT on text files, or a model of torch.export");
  const auto flags = std::make_shared<TrainFlags>();
  command->add_option("--out", flags->out, "Run folder: log, snapshots, model, report")
      ->type_name("DIR")
      ->default_str("run");
  command->add_flag("--resume", flags->resume, "Go on from the newest snapshot in --out");
  for (const Setting& setting : settings()) {
    add_setting(*command, setting, flags);
  }
  command->add_option("--accumulate", flags->accumulate, "In the place of --micro-batch: micro-batches per step")
      ->type_name("K")
      ->excludes("--micro-batch");
  command
      ->add_option("--tensorboard", flags->tensorboard,
                   "Also write the steps' numbers for TensorBoard there; with --resume, give it again")
      ->type_name("DIR");
  command->add_option("--timeout", flags->timeout, "Seconds for which ranks wait for each other (default 1800)")
      ->type_name("S");
  command->callback([flags] {
    try {
      run_train(*flags);
    } catch (const DistributedError&) {
      std::this_thread::sleep_for(kAfterYou);
      throw;
    }
  });
}

}  // namespace snug::cli
