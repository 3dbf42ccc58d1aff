#pragma once
// TrainConfig: all settings that decide the computation of a training run. `snug train` fills a TrainConfig from flags.
// A run folder keeps the settings in the first line of the log, so that a run is resumed with the original settings.
//
//   snug::TrainConfig config{.data = {"plays/"}, .out = "run", .steps = 500};
//   config.check();

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "program/report/run_log.h"
#include "snug/core.h"
#include "snug/precision.h"
#include "snug/stepper.h"

namespace snug {

/// The activations that are recomputed in backward.
enum class Checkpointing {
  None,    ///< keep all activations
  Blocks,  ///< keep the input of every block
  Auto,    ///< the fastest choice within the memory limit, operator by operator: see BudgetOptions
};
/// "none", "blocks", "auto".
std::string_view to_string(Checkpointing);
/// Throws ConfigError and lists the names.
Checkpointing checkpointing_from_string(std::string_view name);

/// The optimizer. See the classes of the same names.
enum class OptimizerChoice { AdamW, AdamW8bit, Adam, Sgd, Muon };
/// "adamw", "adamw8bit", "adam", "sgd", "muon"; and back, or ConfigError with the names.
std::string_view to_string(OptimizerChoice);
OptimizerChoice optimizer_from_string(std::string_view name);

/// The treatment of a step whose loss or gradients are not finite, or far above the loss or gradients of earlier steps.
enum class OnSpike {
  GoOn,      ///< the step is made; a run whose parameters are not finite then ends
  Skip,      ///< the step's update is left out
  RollBack,  ///< the run goes back to the newest snapshot, and on with the data after the step's data
};
/// "go-on", "skip", "roll-back"; and back, or ConfigError with the names.
std::string_view to_string(OnSpike);
OnSpike on_spike_from_string(std::string_view name);

/// "full", "low"; and back, or ConfigError with the names.
std::string_view to_string(Weights);
Weights weights_from_string(std::string_view name);
/// How a learning rate that was tuned for one batch size carries over to another.
enum class LrScaling {
  None,    ///< unchanged
  Linear,  ///< times batch / base_batch: SGD (Goyal et al. 2017, arXiv:1706.02677, section 2.1)
  Sqrt,    ///< times sqrt(batch / base_batch): keeps the variance of the update (Krizhevsky 2014, arXiv:1404.5997)
};
/// "none", "linear", "sqrt"; and back, or ConfigError with the names.
std::string_view to_string(LrScaling);
LrScaling lr_scaling_from_string(std::string_view name);
/// The learning rate for `batch` items per optimizer step (of all ranks and micro-batches together), given the one
/// that suits `base_batch`. Throws ConfigError unless base_lr is positive and finite and both sizes are at least 1.
double scale_learning_rate(double base_lr, int64_t batch, int64_t base_batch, LrScaling scaling);

struct TrainConfig {
  /// Files and folders: of text, or of .safetensors with the inputs of an exported model.
  std::vector<std::filesystem::path> data;
  std::filesystem::path out;       ///< the run folder
  std::string model = "gpt-tiny";  ///< see gpt_configuration; or a file of torch.export, which ends in .pt2
  int64_t batch = 64;              ///< samples per optimizer step; for a GPT, sequences
  int64_t micro_batch =
      0;  ///< samples at a time; 0: the whole batch, or with Checkpointing::Auto what is fastest within the limit
  Bytes memory = Bytes::unlimited();  ///< hard limit on live tensor memory on the device
  Precision precision = Precision::Float32;
  bool fp32_reductions = false;  ///< in 16 bits on a CPU: see SixteenBitOptions
  /// Low: 16-bit weights of `precision`'s type, with FP32 masters; or see splits_weights().
  Weights weights = Weights::Full;
  /// The number of steps with trouble before the blocks move to FP32. 0: never. Not given: 20 with Auto, else never.
  /// See SixteenBitOptions::guard.
  std::optional<int64_t> precision_guard = {};
  std::optional<Checkpointing> checkpointing = {};  ///< not given: Auto with a memory limit, else None
  /// Tensors saved for backward go to the host or, on a CPU, to a file in `out`. See SaveOnHost. With
  /// Checkpointing::Auto, a plan chooses the tensors, and the optimizer's state may go, too: see
  /// BudgetOptions::offload.
  bool offload = false;
  /// Muon is for a GPT; AdamW updates the GPT's embeddings, biases and norms.
  OptimizerChoice optimizer = OptimizerChoice::AdamW;
  bool shard_optimizer = false;  ///< on several ranks, each rank keeps a share of the state: see ShardedOptimizer
  /// The ranks that share the model out among themselves, with a memory limit; 0: all. See
  /// DataParallelOptions::shard_group.
  int64_t shard_group = 0;
  double lr = 1e-3;                        ///< the highest learning rate, with warm-up and cosine
  LrScaling lr_scaling = LrScaling::None;  ///< how `lr`, meant for kBaseBatch samples, follows `batch`
  double weight_decay = 0.1;               ///< of matrices; Adam and SGD add the decay to the gradient
  double clip_norm = 1.0;
  int64_t steps = 1000;
  std::optional<int64_t> warmup_steps = {};  ///< at most `steps`, 0: none; not given: a twentieth of the steps
  std::optional<int64_t> validate_every =
      {};  ///< steps; 0: after the last step only; not given: twenty times in the run
  std::optional<int64_t> snapshot_every = {};  ///< steps; 0: after the last step only; not given: ten times in the run
  int64_t gradient_statistics_every = 0;       ///< steps between samples of the gradients' exponents; 0: none
  OnSpike on_spike = OnSpike::GoOn;
  bool async_snapshots = false;  ///< written while training goes on, if memory is left to copy the state
  int64_t seed = 1;
  std::string device = "cpu";  ///< see parse_device; "cuda": this rank's device

  static constexpr int64_t kBaseBatch = 64;

  /// Throws ConfigError, naming the field and its value, for settings that cannot work together.
  void check() const;

  /// The given value, or the default.
  Checkpointing checkpoint() const;
  int64_t warmup() const;
  int64_t guard_patience() const;
  /// AdamW8bit with `weights` low in BF16 keeps a byte of each weight instead of an FP32 master: see
  /// AdamW8bitOptions::split_weights.
  bool splits_weights() const;
  int64_t validation_interval() const;
  int64_t snapshot_interval() const;
  /// `lr` for `batch` samples.
  double peak_lr() const;

  /// The settings in the run log: everything but `out`, with numbers for values that were not given.
  LogValues to_settings() const;
  /// Throws CorruptFile if a setting is missing or of another type. A setting that earlier versions did not have may be
  /// missing, and then has the default.
  static TrainConfig from_settings(const LogValues& saved, std::filesystem::path out);
};

}  // namespace snug
