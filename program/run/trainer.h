#pragma once
// Trainer: trains a Gpt on text files, with a run log, validation and snapshots, and resumes exactly. `snug train` runs
// a Trainer; a program with a model of its own uses Stepper instead.
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
  Fresh,  ///< a new run; the run folder must not exist, or must be empty
  /// Go on from the newest snapshot. The log is cut back to the snapshot. Memory limit and device may differ. Data and
  /// an exported model may have moved; the snapshot identifies both by checksums of their bytes.
  Resume,
};

struct TrainCallbacks {
  /// Called after every step, when the step's record is in the log.
  std::function<void(const StepRecord&)> on_step = {};
  /// Called with notes for the user: a slow precision; the step from which a run is resumed; and, before the first
  /// step, changes of ranks, threads, LibTorch, CPU and device, because last bits may differ.
  std::function<void(const std::string&)> on_note = {};
  /// Called after every step; true, on any rank, ends the run with a snapshot.
  std::function<bool()> stop_requested = {};
};

struct TrainOutcome {
  int64_t step = 0;            ///< steps done, including steps before a resume
  bool finished = false;       ///< false: stop_requested
  double validation_loss = 0;  ///< nats per byte on held-out text, after the last step; NaN if not finished
};

class ProcessGroup;

class Trainer {
 public:
  /// Reads the data, builds model and optimizer, and loads the snapshot for Resume. Writes nothing. Throws:
  /// - ConfigError for settings or data that cannot work, a run folder that exists (Fresh) or does not exist (Resume),
  ///   or data or an exported model that are missing or have other bytes than the run's (Resume);
  /// - CorruptFile for a damaged run folder;
  /// - BudgetExceeded if the limit is too small for the model, the model's gradients and the optimizer's state.
  ///
  /// With a `group`, each rank of the group trains on a share of every batch. The run equals the run of one rank except
  /// for rounding. Rank 0 alone writes the run folder and calls on_step and on_note. A run may be resumed on another
  /// number of ranks; all ranks must see the run folder. An error on one rank ends as an error on all ranks: on the
  /// other ranks as DistributedError.
  Trainer(TrainConfig config, Start start, std::shared_ptr<ProcessGroup> group = nullptr);
  ~Trainer();

  /// Trains to the last step, or until told to stop. Without a limit, running out of memory is a c10::OutOfMemoryError.
  /// Throws:
  /// - BudgetExceeded if a step or a snapshot does not fit into config.memory; if the first step does not fit, no run
  ///   folder is made;
  /// - NonFinite, naming a parameter, if float16 continues to overflow at a loss scale of 1, for at least 32 skipped
  ///   steps in a row;
  /// - NonFinite, naming a parameter, if a parameter is not finite after a step with gradients that are not finite, or
  ///   before a snapshot is made: then no snapshot is made;
  /// - NonFinite if with config.on_spike more than 10 steps in a row are out of line, or the run has gone back to the
  ///   same snapshot more than 3 times; or if the held-out loss after the last step is not finite.
  TrainOutcome run(const TrainCallbacks& callbacks);

  /// The paths of a run's log, snapshots, trained model and, with Checkpointing::Auto, plan (see StepPlan).
  static std::filesystem::path log_path(const std::filesystem::path& out) { return out / "log.jsonl"; }
  static std::filesystem::path snapshots_path(const std::filesystem::path& out) { return out / "snapshots"; }
  static std::filesystem::path plan_path(const std::filesystem::path& out) { return out / "plan.json"; }
  /// The folder of a run's plans, for resuming the run: see BudgetOptions::plan_folder.
  static std::filesystem::path plan_folder(const std::filesystem::path& out) { return out / "plans"; }
  static std::filesystem::path model_path(const std::filesystem::path& out) { return out / "model.safetensors"; }

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace snug
