#pragma once
// Trainer: trains a Gpt on text files, with a run log, validation and snapshots, and resumes exactly. `snug train` runs
// it; a program with a model of its own uses Stepper instead.
//
//   snug::Trainer trainer({.data = {"plays/"}, .out = "run", .steps = 500}, snug::Start::Fresh);
//   auto outcome = trainer.run({.on_step = [](const snug::StepRecord& r) { std::cout << r.loss << "\n"; }});
//
// The run folder: log.jsonl (see RunLog), snapshots/ (see SnapshotStore), model.safetensors (FP32, plain parameter
// names).

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "program/report/run_log.h"
#include "program/run/config.h"

namespace snug {

enum class Start {
  Fresh,  ///< a new run; its folder must not exist, or be empty
  /// Go on from the newest snapshot, to which the log is cut back. Memory limit and device may be others. Data and an
  /// exported model may lie elsewhere; the snapshot knows their bytes by their sums.
  Resume,
};

struct TrainCallbacks {
  /// Called after every step, when its record is in the log.
  std::function<void(const StepRecord&)> on_step = {};
  /// Called with notes for the user: a slow precision, the step from which a run is resumed, and before the first step
  /// which of ranks, threads, LibTorch, CPU and device differ from before, so that last bits may differ.
  std::function<void(const std::string&)> on_note = {};
  /// Called after every step; true, on any rank, ends the run with a snapshot.
  std::function<bool()> stop_requested = {};
};

struct TrainOutcome {
  int64_t step = 0;            ///< steps done, those before a resume included
  bool finished = false;       ///< false: stop_requested
  double validation_loss = 0;  ///< nats per byte on held-out text, after the last step; NaN if not finished
};

class ProcessGroup;

class Trainer {
 public:
  /// Reads the data, builds model and optimizer, and loads the snapshot for Resume. Writes nothing.
  /// Throws ConfigError for settings or data that cannot work or a run folder that exists (Fresh) or does not (Resume),
  /// or if data or an exported model are not there, or are not those of the run by their bytes (Resume); CorruptFile
  /// for a damaged run folder; BudgetExceeded if the limit is too small for the model, its gradients and the
  /// optimizer's state.
  ///
  /// With a `group`, each of its ranks trains on its share of every batch, and the run is that of one rank but for
  /// rounding. Rank 0 alone writes the run folder and calls on_step and on_note; to resume, on the same number of ranks
  /// or another, all must see it. An error on one rank ends as an error on all: elsewhere as DistributedError.
  Trainer(TrainConfig config, Start start, std::shared_ptr<ProcessGroup> group = nullptr);
  ~Trainer();

  /// Trains to the last step, or until told to stop. If no limit is set, running out of memory is a
  /// c10::OutOfMemoryError. Throws
  /// - BudgetExceeded if a step or a snapshot does not fit into config.memory; if it is the first step, no run folder
  ///   is made;
  /// - NonFinite, naming a parameter, if float16 continues to overflow at a loss scale of 1, for at least 32 skipped
  ///   steps in a row;
  /// - NonFinite, naming a parameter, if a parameter is not finite when a step has had gradients that are not, or
  ///   before a snapshot is made: none is made then;
  /// - NonFinite if with config.on_spike more than 10 steps in a row are out of line, or the run has gone back to the
  ///   same snapshot more than 3 times; or if the held-out loss after the last step is not finite.
  TrainOutcome run(const TrainCallbacks& callbacks);

  /// Where the log, the snapshots, the trained model and, with Checkpointing::Auto, the plan (see StepPlan) of a run
  /// lie.
  static std::filesystem::path log_path(const std::filesystem::path& out) { return out / "log.jsonl"; }
  static std::filesystem::path snapshots_path(const std::filesystem::path& out) { return out / "snapshots"; }
  static std::filesystem::path plan_path(const std::filesystem::path& out) { return out / "plan.json"; }
  /// Where the plans of a run lie, for it to be resumed with: see StepperOptions::plan_folder.
  static std::filesystem::path plan_folder(const std::filesystem::path& out) { return out / "plans"; }
  static std::filesystem::path model_path(const std::filesystem::path& out) { return out / "model.safetensors"; }

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace snug
