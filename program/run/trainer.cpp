#include "program/run/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include "program/datasets/evenly_spread.h"
#include "program/datasets/text_corpus.h"
#include "program/run/device.h"
#include "program/run/folder_lock.h"
#include "program/run/matmul_accumulation.h"
#include "program/run/run_data.h"
#include "program/run/run_folder.h"
#include "program/run/run_inputs.h"
#include "program/run/run_machine.h"
#include "program/run/run_model.h"
#include "program/run/run_optimizer.h"
#include "program/run/run_ranks.h"
#include "program/run/run_records.h"
#include "program/run/spike_watch.h"
#include "snug/autocast.h"
#include "snug/core.h"
#include "snug/distributed/data_parallel.h"
#include "snug/extra/gradient_noise.h"
#include "snug/memory.h"
#include "snug/offload.h"
#include "snug/safetensors.h"
#include "snug/sampler.h"
#include "snug/schedule.h"
#include "snug/snapshot.h"
#include "snug/state.h"
#include "snug/stepper.h"
#include "src/core/file_system.h"
#include "src/core/limit_below_use.h"
#include "src/data/shares.h"
#include "src/precision/matmul_speed.h"

namespace snug {
namespace {

constexpr int64_t kValidationSamples = 64;
constexpr int64_t kMostSpikes = 10;    // in a row
constexpr int64_t kMostRollbacks = 3;  // to one snapshot
constexpr int64_t kScaleSearch = 16;   // steps from the scaler's first scale, 2^16, to 1
constexpr std::string_view kOtherLastBits =
    "from here on, losses and weights may differ in their last bits from those of an uninterrupted run";

std::string names_of(const std::vector<std::filesystem::path>& paths) {
  return paths.front().string() + (paths.size() > 1 ? fmt::format(" and {} more", paths.size() - 1) : "");
}

// Throws BudgetExceeded for any allocation that fails in `part` because of the limit. Without a limit the machine
// itself is too small. `cure`: a way to take less memory, if one exists.
template <class F>
auto within_limit(const TrainConfig& config, std::string_view what, std::string_view cure, F&& part) {
  try {
    return part();
  } catch (const c10::Error& error) {
    if (config.memory.is_unlimited() || !is_out_of_memory(error)) {
      throw;
    }
    throw BudgetExceeded(fmt::format("train: {} does not fit into {}: {}{}{}", what, config.memory.str(),
                                     error.what_without_backtrace(), cure.empty() ? "" : "; less is taken by ", cure));
  }
}

template <class F>
auto within_limit(const TrainConfig& config, std::string_view what, F&& part) {
  return within_limit(config, what, /*cure=*/{}, std::forward<F>(part));
}

}  // namespace

class Trainer::Impl {
 public:
  Impl(TrainConfig config, Start start, std::shared_ptr<ProcessGroup> group)
      : config_(checked(std::move(config))),
        ranks_(std::move(group)),
        start_(start_checked(start)),
        device_(make_current(detail::device_of_rank(config_.device, ranks_.local_rank()))),
        limit_(make_limit()),
        task_(within_limit(config_, "the model", smaller_model(), [&] { return make_model(); })),
        model_(*task_.module),
        data_(within_limit(config_, "the data", [&] { return detail::load_run_data(config_, task_.inputs); })),
        data_checksum_(data_->checksum()),
        sampler_(data_->samples(Split::Train), static_cast<uint64_t>(config_.seed)),
        optimizer_(model_, config_, ranks_.group(), config_.shard_optimizer || may_shard()),
        data_parallel_(within_limit(config_, "the buckets of gradients", [&] { return make_data_parallel(); })),
        stepper_(within_limit(config_, "the stepper", [&] { return make_stepper(); })),
        snapshots_(snapshots_path(config_.out), {.on_damaged = [this](int64_t step, const std::string& reason) {
                     damaged_.emplace_back(step, reason);
                   }}) {
    schedule_ = {.peak = config_.peak_lr(),
                 .warmup_steps = config_.warmup(),
                 .total_steps = config_.steps,
                 .floor = config_.peak_lr() / 10};
    schedule_.check();
    detail::accumulate_matmuls_in_fp32();
    model_.eval();  // throws for an exported model without a graph for held-out losses
    model_.train();
    check_parameters_fit();
    detail::check_batch(config_, task_.inputs, ranks_.size());
    detail::check_held_out(data_->samples(Split::Validation), task_.inputs);
    if (start_ == Start::Resume) {
      lock_folder();
      step_ = within_limit(config_, "the snapshot", [&] { return snapshots_.load_latest(parts()).value_or(0); });
      ranks_.check_same_step(step_);
    }
  }

  TrainOutcome run(const TrainCallbacks& callbacks) {
    const auto note = [&](const std::string& text) {
      if (callbacks.on_note && ranks_.is_first()) {
        callbacks.on_note(text);
      }
    };
    note_precision(note);
    if (start_ == Start::Resume) {
      resume(note);
    }
    TrainOutcome outcome{.step = step_, .validation_loss = std::numeric_limits<double>::quiet_NaN()};
    if (step_ >= config_.steps) {  // the run was killed between the last snapshot and the end
      outcome.finished = true;
      const auto measured = detail::logged_validation_loss(config_.out, step_);
      const bool is_missing = ranks_.any(!measured);  // a rank may see another log
      outcome.validation_loss =
          is_missing ? within_limit(config_, "the held-out loss", [&] { return validation_loss(); }) : *measured;
    }
    std::optional<SaveOnHost> offload;
    if (config_.offload && !plans()) {
      detail::FileSystem::real().create_directories(config_.out);
      // On a disk, because the temporary directory may be memory.
      offload.emplace(OffloadOptions{.directory = config_.out});
    }
    while (step_ < config_.steps) {
      StepNotes notes;
      const StepRecord record = one_step(notes);
      if (ranks_.is_first()) {
        write_log(record, notes.events);
      }
      for (const std::string& change : notes.changes) {
        note(fmt::format("step {}: {}", step_, change));
      }
      if (callbacks.on_step && ranks_.is_first()) {
        callbacks.on_step(record);
      }
      if (!spike_.empty() && config_.on_spike == OnSpike::RollBack && newest_snapshot()) {
        roll_back(note);
        continue;
      }
      if (!spike_.empty()) {
        note(fmt::format("step {} skipped: {}", step_, spike_));
      } else if (record.stepped && !std::isfinite(record.grad_norm)) {
        detail::check_finite(record, model_);
      }
      count_spike();
      const bool last = step_ == config_.steps;
      const bool stop = ranks_.any(!last && callbacks.stop_requested && callbacks.stop_requested());
      if (stop || is_due(config_.snapshot_interval())) {
        save_snapshot(record);
      }
      outcome = {
          .step = step_, .finished = last, .validation_loss = record.validation_loss.value_or(outcome.validation_loss)};
      if (stop) {
        break;
      }
    }
    finish_snapshots(note);
    if (offload) {
      note("offload: " + offload->report().str());
    } else if (const auto plan = config_.offload ? stepper_.plan() : std::nullopt; plan && plan->activations) {
      const SaveOnHost::Report report = plan->activations->offloaded();
      if (report.bytes_out + report.failed_writes > 0) {
        note("offload: " + report.str());
      }
    }
    if (outcome.finished && !std::isfinite(outcome.validation_loss)) {
      throw NonFinite(
          fmt::format("train: after the last step the held-out loss is {}; begin a new run with a lower --lr",
                      outcome.validation_loss));
    }
    if (outcome.finished) {
      on_all_ranks([&] { save_model(); });
    }
    return outcome;
  }

 private:
  static TrainConfig checked(TrainConfig config) {
    config.check();
    return config;
  }

  std::unique_ptr<MemoryLimit> make_limit() const {
    if (live_bytes(device_) > config_.memory) {
      throw BudgetExceeded(fmt::format("train: {} of tensors are alive already, more than the limit of {}",
                                       live_bytes(device_).str(), config_.memory.str()));
    }
    try {
      return std::make_unique<MemoryLimit>(device_, config_.memory);
    } catch (const detail::LimitBelowUse& error) {
      throw BudgetExceeded(fmt::format("train: {}", error.what()));
    }
  }

  Start start_checked(Start start) const {
    std::error_code unreadable;  // a later read of the folder gives a better message
    const auto there = std::filesystem::status(config_.out, unreadable);
    if (start == Start::Fresh && std::filesystem::exists(there) && !std::filesystem::is_directory(there)) {
      throw ConfigError(
          fmt::format("train: --out '{}' is there already and is no folder; give another one", config_.out.string()));
    }
    if (start == Start::Fresh && ranks_.is_first() && detail::holds_something(config_.out)) {
      throw ConfigError(fmt::format(
          "train: the run folder '{}' is there already and not empty; go on with it by --resume, or give another --out",
          config_.out.string()));
    }
    if (start == Start::Fresh && config_.shard_optimizer && ranks_.size() == 1) {
      throw ConfigError(
          "train: shard_optimizer shares the state out to ranks, and there is one; leave it out, or start several");
    }
    if (start == Start::Fresh && config_.shard_group > 0 && !may_shard()) {
      throw ConfigError(
          "train: shard_group is for several ranks that share the model out; give --memory on several ranks, or leave it "
          "out");
    }
    if (start == Start::Resume && !std::filesystem::exists(log_path(config_.out))) {
      throw ConfigError(fmt::format("train: there is no run in '{}' to resume; leave --resume out to begin one",
                                    config_.out.string()));
    }
    if (start == Start::Resume) {
      check_not_moved();
    }
    return start;
  }

  // Checks the files named by the log of a run.
  void check_not_moved() const {
    const auto check = [&](const std::filesystem::path& path, const char* what) {
      std::error_code unreadable;
      if (std::filesystem::status(path, unreadable).type() == std::filesystem::file_type::not_found) {
        throw ConfigError(fmt::format(
            "train: there is no {}, the {} of the run in '{}'; if it has moved, say by --{} where it is now",
            path.string(), what, config_.out.string(), what));
      }
    };
    for (const auto& path : config_.data) {
      check(path, "data");
    }
    if (is_exported(config_.model)) {
      check(config_.model, "model");
    }
  }

  // Whether a plan may put the optimizer's state, or weights and gradients too, into files, or of a device on the host.
  bool state_may_leave() const { return config_.offload && plans() && device_.is_cpu(); }
  bool model_could_leave() const {
    return plans() && ranks_.size() == 1 && (!device_.is_cpu() || config_.weights == Weights::Full);
  }
  bool model_may_leave() const { return config_.offload && model_could_leave(); }

  // Whether ranks share gradients and state out, and weights if a plan needs that. See Shard::Auto for what is refused;
  // statistics of gradients need all gradients.
  bool may_shard() const {
    return plans() && device_.is_cpu() && ranks_.size() > 1 && config_.weights == Weights::Full &&
           config_.guard_patience() == 0 && config_.gradient_statistics_every == 0;
  }

  std::unique_ptr<DataParallel> make_data_parallel() {
    DataParallelOptions options;
    if (may_shard()) {
      int64_t weights = 0;
      for (const at::Tensor& parameter : model_.parameters()) {
        weights += static_cast<int64_t>(parameter.nbytes());
      }
      // A plan counts the bytes on their way, and the default is more than a small model.
      options.bucket = Bytes(std::min(options.bucket.count(), 1 + weights / 16));
      options.shard = Shard::Auto;
      options.shard_group = config_.shard_group;
      options.optimizer = optimizer_.sharded();
    }
    return ranks_.data_parallel(task_.module, options);
  }

  // The option that takes less memory than the model needs now.
  const char* smaller_model() const {
    return !model_could_leave() || config_.offload ? "a smaller --model"
           : device_.is_cpu()                      ? "a smaller --model, or its weights in a file (--offload)"
                                                   : "a smaller --model, or its weights on the host (--offload)";
  }

  // If the model does not fit into memory, the model lies in files, or its weights are on the host. The weights are the
  // same.
  RunModel make_model() const {
    const bool may_leave = model_may_leave() || may_shard();
    if (may_leave && !device_.is_cpu()) {
      return run_model_or_on_host(config_, device_);
    }
    try {
      return run_model(config_, device_);
    } catch (const c10::Error& error) {
      if (!may_leave || !is_out_of_memory(error)) {
        throw;
      }
    }
    detail::FileSystem::real().create_directories(config_.out);
    const TensorsInFile in_files(config_.out);
    return run_model(config_, device_);
  }

  // Without this check, the error shows in the first step or, if the text is long, much later.
  void check_parameters_fit() const {
    if (model_may_leave() || may_shard()) {
      return;
    }
    int64_t gradients = 0;
    for (const auto& group : optimizer_->param_groups()) {
      for (const at::Tensor& parameter : group.params()) {  // FP32 masters, if the run has masters
        gradients += parameter.requires_grad() ? static_cast<int64_t>(parameter.nbytes()) : 0;
      }
    }
    const bool may_leave = state_may_leave();
    const int64_t state = may_leave ? 0 : optimizer_.state_bytes_to_come();
    const Bytes least = live_bytes(device_) + Bytes(gradients + state);
    if (least > config_.memory) {
      throw BudgetExceeded(fmt::format(
          "train: {} takes {} on {} for the parameters and their gradients{} alone, and a step needs more; the limit is "
          "{}; raise it, {}or train a smaller model",
          config_.model, least.str(), device_.str(), may_leave ? "" : " and the optimizer's state",
          config_.memory.str(), plans() && !may_leave && device_.is_cpu() ? "add --offload, " : ""));
    }
  }

  // On a GPU the way of summing matrix products matters, and snug's way is not LibTorch's default.
  static RunEvent matmul_accumulation_event() {
    const detail::MatmulAccumulation how = detail::matmul_accumulation();
    return {.name = "matrix products",
            .step = 0,
            .details = {{"fp16_reduction", how.fp16_reduction},
                        {"bf16_reduction", how.bf16_reduction},
                        {"fp16_accumulation", how.fp16_accumulation},
                        {"tf32", how.tf32}}};
  }

  // A run that overflows for ever ends with an error. Before that, the search for a scale may go on, and then the guard
  // may move first the blocks and after them the whole step to FP32.
  int64_t most_skips() const { return 2 * (kScaleSearch + config_.guard_patience()); }

  bool keeps_masters() const { return config_.weights == Weights::Low && !config_.splits_weights(); }

  bool plans() const { return config_.checkpoint() == Checkpointing::Auto; }

  Stepper make_stepper() {
    std::optional<std::filesystem::path> planned_offload;
    if (config_.offload && plans()) {
      detail::FileSystem::real().create_directories(config_.out);
      planned_offload = device_.is_cpu() ? std::filesystem::path(config_.out) : "";
    }
    return {model_,
            *optimizer_,
            {.precision = config_.precision,
             .weights = keeps_masters() ? Weights::Low : Weights::Full,
             .micro_batch = config_.micro_batch,
             .clip_norm = config_.clip_norm,
             .budget = {.memory = plans() ? config_.memory : Bytes::unlimited(),
                        .plan_folder = plans() ? plan_folder(config_.out) : std::filesystem::path(),
                        .offload = planned_offload},
             .ranks = {.data_parallel = data_parallel_.get()},
             .sixteen_bit = {.scaler = {.min_scale = 1, .max_consecutive_skips = most_skips()},
                             .guard = {.patience = config_.guard_patience()},
                             .fp32_reductions = config_.fp32_reductions},
             .accept_update = accept_update(),
             .gradient_noise = config_.micro_batch > 0 || plans()}};
  }

  // With on_spike, a step out of line leaves the parameters unchanged.
  std::function<bool(const StepResult&)> accept_update() {
    if (config_.on_spike == OnSpike::GoOn) {
      return {};
    }
    return [this](const StepResult& result) {
      spike_ = spikes_.judge(detail::without_nan_sign(result.loss()), detail::without_nan_sign(result.grad_norm()));
      return spike_.empty();
    };
  }

  // A run that stays out of line ends.
  void count_spike() {
    spikes_in_a_row_ = spike_.empty() ? 0 : spikes_in_a_row_ + 1;
    if (spikes_in_a_row_ > kMostSpikes) {
      throw NonFinite(
          fmt::format("train: {} steps in a row are out of line, the last one, {}, as {}; begin a new run "
                      "with a lower --lr",
                      spikes_in_a_row_, step_, spike_));
    }
  }

  // Call resume() after the snapshot is loaded. A finished run keeps the run's settings.
  void resume(const std::function<void(const std::string&)>& note) {
    if (!ranks_.is_first()) {
      return;
    }
    set_damaged_aside(note);
    note(fmt::format("resumed after step {}", step_));
    if (step_ == config_.steps) {
      log_ = detail::cut_log(config_, step_);
      return;
    }
    const RunHistory before = read_run_log(log_path(config_.out));
    log_ = detail::resume_log(config_, step_);
    planned_before_ = detail::planned_micro_batch(before, step_);
    if (const auto changes = detail::machine_changes(before, machine(step_)); !changes.empty()) {
      note(fmt::format("goes on with {}: {}", fmt::join(changes, "; "), kOtherLastBits));
    }
    log_machine(before);
  }

  // Goes on from the newest snapshot, with the next data: the data used since the snapshot are left out.
  void roll_back(const std::function<void(const std::string&)>& note) {
    const int64_t from = step_, epoch = sampler_.epoch(), position = sampler_.position();
    const std::string reason = std::exchange(spike_, {});
    step_ = within_limit(config_, "the snapshot", [&] { return snapshots_.load_latest(parts()).value_or(0); });
    ranks_.check_same_step(step_);
    sampler_.seek(epoch, position);
    if (++rollbacks_ > kMostRollbacks) {
      throw NonFinite(
          fmt::format("train: the run went back to step {} {} times, the last time from step {}, as {}; "
                      "begin a new run with a lower --lr",
                      step_, kMostRollbacks, from, reason));
    }
    if (ranks_.is_first()) {
      set_damaged_aside(note);
      const RunHistory before = read_run_log(log_path(config_.out));
      log_ = detail::cut_log(config_, step_);
      log_machine(before);
      log_->event({.name = "roll back", .step = step_, .details = {{"from_step", from}, {"reason", reason}}});
    }
    note(fmt::format("went back from step {} to the snapshot of step {}: {}", from, step_, reason));
  }

  // Whether an action that is due every `interval` steps, and after the last one, is due after this step.
  bool is_due(int64_t interval) const { return step_ == config_.steps || (interval > 0 && step_ % interval == 0); }

  void note_precision(const std::function<void(const std::string&)>& note) {
    if (config_.precision == Precision::Auto) {
      note(fmt::format("precision auto: {} on {}, by measurement", to_string(stepper_.precision()), device_.str()));
    }
    if (config_.precision == Precision::Float16 || config_.precision == Precision::BFloat16) {
      const auto speed = within_limit(config_, "measuring the speed of 16 bits",
                                      [&] { return detail::measure_matmul_speed(device_); });
      const double ratio = config_.precision == Precision::Float16 ? speed.float16 / speed.float32_small
                                                                   : speed.bfloat16 / speed.float32;
      if (ratio < 1) {
        note(
            fmt::format("warning: {} matrix products run at {:.3g} times the speed of float32 on {}; training goes on, "
                        "but float32 or auto would be faster",
                        to_string(config_.precision), ratio, device_.str()));
      }
    }
  }

  Batch next_batch() {
    const auto samples = sampler_.next(config_.batch, ranks_.rank(), ranks_.size());
    return data_->batch(samples, Split::Train);
  }

  void write_log(const StepRecord& record, const std::vector<RunEvent>& events) {
    if (!log_) {
      detail::FileSystem::real().create_directories(config_.out);
      lock_folder();
      detail::remove_rest_of_a_kill(config_.out);
      log_ = RunLog::create(log_path(config_.out), config_.to_settings(), {matmul_accumulation_event(), machine(0)});
    }
    log_->write(record);
    for (const RunEvent& event : events) {
      log_->event(event);
    }
    if (const std::string plan = std::exchange(plan_to_save_, {}); !plan.empty()) {
      detail::replace_file(plan_path(config_.out), plan);
    }
  }

  void lock_folder() {
    if (ranks_.is_first()) {
      lock_.emplace(config_.out);
    }
  }

  // Snapshots newer than the loaded snapshot: the run writes new snapshots of the same steps.
  void set_damaged_aside(const std::function<void(const std::string&)>& note) {
    for (const auto& [step, reason] : std::exchange(damaged_, {})) {
      note(fmt::format("{}; it is {} now", reason, snapshots_.set_aside(step).filename().string()));
    }
  }

  // Refuses ranks whose models differ, because the snapshot hides the difference. Makes no snapshot of parameters that
  // are not finite.
  void save_snapshot(const StepRecord& record) {
    if (data_parallel_) {
      data_parallel_->check_replicas();
    }
    rollbacks_ = 0;
    within_limit(config_, fmt::format("the snapshot of step {}", step_), [&] {
      detail::check_finite(record, model_);
      // Ranks with shares write together, so they must not write beside training.
      if (!config_.async_snapshots || optimizer_.sharded() != nullptr) {
        on_all_ranks([&] {
          sync_log();
          snapshots_.save(step_, parts());
        });
      } else if (ranks_.is_first()) {
        sync_log();
        saving_.save(step_, parts());
      }
    });
  }

  void sync_log() {
    if (ranks_.is_first()) {
      log_->sync();
    }
  }

  void on_all_ranks(const std::function<void()>& save) {
    ranks_.group() ? ranks_.group()->save_together(save) : save();
  }

  // The step of the newest snapshot that all ranks can load.
  std::optional<int64_t> newest_snapshot() {
    saving_.wait();
    ranks_.any(false);  // the first rank, which saves, has reached this line
    return snapshots_.latest();
  }

  void finish_snapshots(const std::function<void(const std::string&)>& note) {
    saving_.wait();
    const AsyncSnapshots::Report& report = saving_.report();
    if (report.saved > 0) {
      note(report.str());
      log_->event({.name = "snapshots",
                   .step = step_,
                   .details = {{"saved", report.saved},
                               {"at_once", report.at_once},
                               {"training_seconds", report.training_seconds},
                               {"background_seconds", report.background_seconds}}});
    }
  }

  // The notes of a step beside its record.
  struct StepNotes {
    std::vector<RunEvent> events;
    std::vector<std::string> changes;
  };

  RunEvent machine(int64_t step) const { return detail::machine_event(step, ranks_.size(), device_); }

  // Logs the machine of the steps to come. `before`: the log before the log was cut back to this step.
  void log_machine(const RunHistory& before) {
    const RunEvent now = machine(step_);
    if (detail::machine_after(before, step_) != now.details) {
      log_->event(now);
    }
  }

  // Notes the plan, if this step had another plan than the step before.
  void note_plan(StepNotes& notes) {
    const auto plan = stepper_.plan();
    if (!plan || plan->choice == planned_) {
      return;
    }
    planned_ = plan->choice;
    const char* const less =
        config_.offload ? "some of each computed again or offloaded" : "some of each computed again";
    plan_to_save_ = plan->to_json();
    notes.events.push_back(detail::event_of(step_, *plan));
    const std::string file = plan->read_from.empty() ? "" : fmt::format(" (read from {})", plan->read_from.string());
    notes.changes.push_back(fmt::format(
        "planned for {}{}: {} micro-batches of {}, {}{}{}; {} at the peak", config_.memory.str(), file,
        planned_->micro_batches, planned_->items, plan->activations ? less : "all of each kept",
        plan->placement.model == Place::File   ? ", weights, gradients and the optimizer's state in files"
        : plan->placement.model == Place::Host ? ", weights, gradients and the optimizer's state in the host's memory"
        : plan->placement.state == Place::File ? ", the optimizer's state in a file"
        : plan->placement.state == Place::Host ? ", the optimizer's state in the host's memory"
                                               : "",
        plan->bytes.weights.outside > 0 && plan->placement.model == Place::Memory ? ", weights in shards" : "",
        Bytes(planned_->peak_bytes).str()));
    if (const int64_t before = std::exchange(planned_before_, 0); before != 0 && before != planned_->items) {
      notes.changes.push_back(
          fmt::format("micro-batches of {}, not of {} as before: {}", planned_->items, before, kOtherLastBits));
    }
  }

  StepRecord one_step(StepNotes& notes) {
    const char* const less =
        plans() ? "" : "smaller micro-batches (--micro-batch) or recomputation (--checkpoint auto)";
    return within_limit(config_, fmt::format("step {}", step_ + 1), less, [&] {
      const double lr = schedule_.at(updates_);  // a skipped step does not count for the schedule
      for (auto& group : optimizer_->param_groups()) {
        group.options().set_lr(lr);
      }
      const Batch batch = next_batch();
      if (config_.gradient_statistics_every > 0 && (step_ + 1) % config_.gradient_statistics_every == 0) {
        stepper_.sample_gradients();
      }
      optimizer_->zero_grad();  // so that the meter begins without gradients
      if (config_.checkpoint() == Checkpointing::Auto && !planned_ && ranks_.size() == 1) {
        stepper_.plan_for(batch, task_.loss_of);  // before the meter looks
      }
      MemoryMeter meter(device_);
      meter.attach(model_);
      meter.attach(*optimizer_);
      const auto begin = std::chrono::steady_clock::now();
      spike_.clear();
      const StepResult result = stepper_.step(batch, task_.loss_of);
      const double loss = result.loss();  // waits for the device
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      ++step_;
      updates_ += result.stepped() ? 1 : 0;
      StepRecord record = detail::record_of(step_, result, meter.report());
      notes = {.events = detail::events_of(step_, result), .changes = result.precision_changes};
      note_plan(notes);
      if (!spike_.empty()) {
        notes.events.push_back({.name = "spike", .step = step_, .details = {{"reason", spike_}}});
      }
      if (result.stepped() && std::isfinite(result.first_grad_norm())) {
        noise_.add(std::pow(result.first_grad_norm(), 2), result.first_batch_items, std::pow(result.grad_norm(), 2),
                   result.batch_items);
        record.gradient_noise_scale = noise_.scale();
      }
      record.loss = detail::without_nan_sign(loss);
      record.learning_rate = lr;
      record.seconds = seconds;
      record.items_per_second = static_cast<double>(result.items) / seconds;
      if (is_due(config_.validation_interval())) {
        record.validation_loss = validation_loss();
      }
      return record;
    });
  }

  double validation_loss() {
    const at::NoGradGuard no_grad;
    std::optional<Autocast> autocast;
    if (config_.weights == Weights::Low) {  // as in training: the 16-bit model is measured
      autocast.emplace(device_.type(), compute_dtype(config_.precision),
                       AutocastOptions{.fp32_reductions = config_.fp32_reductions});
    }
    model_.eval();
    // A rank has whole groups of `group` samples.
    const int64_t group = std::max<int64_t>(1, fixed_samples(task_.inputs));
    const int64_t groups =
        std::max<int64_t>(1, std::min(kValidationSamples, data_->samples(Split::Validation)) / group);
    const auto all = detail::evenly_spread(groups * group, data_->samples(Split::Validation));
    const auto begin = all.begin() + group * detail::share_begin(groups, ranks_.rank(), ranks_.size());
    const auto end = all.begin() + group * detail::share_begin(groups, ranks_.rank() + 1, ranks_.size());
    const Batch mine = data_->batch({begin, end}, Split::Validation);
    const int64_t unplanned = plans() ? group : config_.batch;
    const int64_t given = config_.micro_batch == 0 ? unplanned : config_.micro_batch;
    const int64_t size = group > 1 ? group : planned_ ? planned_->items : given;
    double sum = 0, items = 0;
    for (const Batch& host : micro_batches(mine, size)) {
      const Loss loss = task_.loss_of(host.to(device_));
      const auto count = static_cast<double>(loss.count());
      sum += loss.value().item<double>() * (loss.kind() == Loss::Kind::Mean ? count : 1);
      items += count;
    }
    model_.train();
    return detail::without_nan_sign(ranks_.sum(sum) / ranks_.sum(items));
  }

  // The name makes this part the first part of a snapshot, so nothing is loaded for another model or other data.
  Stateful data_and_model() {
    return {
        [this] {
          StateDict state;
          state.set("size", sampler_.size());
          state.set("text_crc32", data_checksum_);
          if (task_.checksum != 0) {
            state.set("model_crc32", task_.checksum);
          }
          return state;
        },
        [this](const StateDict& state) {
          if (state.get<int64_t>("size") != sampler_.size()) {
            throw ConfigError(fmt::format(
                "train: the run in '{}' was started on text or data with {} samples, and {} has {}; give the same by "
                "--data, from wherever it lies now, or begin a new run",
                config_.out.string(), state.get<int64_t>("size"), names_of(config_.data), sampler_.size()));
          }
          if (state.get<int64_t>("text_crc32") != data_checksum_) {
            throw ConfigError(fmt::format(
                "train: the bytes of {} are not those that the run in '{}' was started on; give these by --data, from "
                "wherever they lie now, or begin a new run",
                names_of(config_.data), config_.out.string()));
          }
          if (task_.checksum != 0 && state.get<int64_t>("model_crc32") != task_.checksum) {
            throw ConfigError(fmt::format(
                "train: the bytes of {} are not those of the model with which the run in '{}' was started; give these "
                "by --model, from wherever they lie now, or begin a new run",
                config_.model, config_.out.string()));
          }
        }};
  }

  std::map<std::string, Stateful> parts() {
    std::map<std::string, Stateful> all = parts_of_each_run();
    if (config_.on_spike != OnSpike::GoOn) {
      all["spikes"] = {[this] {
                         StateDict state;
                         state.set("window", spikes_.numbers());
                         state.set("in_a_row", spikes_in_a_row_);
                         return state;
                       },
                       [this](const StateDict& state) {
                         spikes_.restore(state.get<std::string>("window"));
                         spikes_in_a_row_ = state.get<int64_t>("in_a_row");
                       }};
    }
    return all;
  }

  std::map<std::string, Stateful> parts_of_each_run() {
    return {
        {"data_and_model", data_and_model()},
        {"model", stateful(model_)},
        {"optimizer", stateful(*optimizer_)},
        {"stepper", stateful(stepper_)},
        {"rng", stateful_rng()},
        {"schedule",
         {[this] {
            StateDict state;
            state.set("updates", updates_);
            return state;
          },
          [this](const StateDict& state) { updates_ = state.get<int64_t>("updates"); }}},
        {"gradient_noise",
         {[this] {
            StateDict state;
            state.set("squared_gradient", noise_.sums().squared_gradient);
            state.set("trace", noise_.sums().trace);
            state.set("weight", noise_.sums().weight);
            return state;
          },
          [this](const StateDict& state) {
            noise_.load({.squared_gradient = state.get<double>("squared_gradient"),
                         .trace = state.get<double>("trace"),
                         .weight = state.get<double>("weight")});
          }}},
        {"sampler",
         {[this] {
            StateDict state;
            state.set("epoch", sampler_.epoch());
            state.set("position", sampler_.position());
            return state;
          },
          [this](const StateDict& state) {
            sampler_.seek(state.get<int64_t>("epoch"), state.get<int64_t>("position"));
          }}},
    };
  }

  void save_model() {
    std::map<std::string, at::Tensor> tensors = task_.buffers();
    for (const auto& [name, parameter] : stepper_.full_precision_parameters()) {
      tensors[name] = parameter.detach();
    }
    save_safetensors(model_path(config_.out), tensors, {{"format", "pt"}, {"snug.model", config_.model}});
  }

  TrainConfig config_;
  detail::RunRanks ranks_;
  Start start_;
  c10::Device device_;
  std::unique_ptr<MemoryLimit> limit_;  // first, so that all members below are under the limit
  RunModel task_;
  torch::nn::Module& model_;  // the module in task_
  std::unique_ptr<detail::RunData> data_;
  int64_t data_checksum_;
  Sampler sampler_;
  detail::RunOptimizer optimizer_;
  std::unique_ptr<DataParallel> data_parallel_;  // null on one rank
  Stepper stepper_;
  std::vector<std::pair<int64_t, std::string>> damaged_;  // snapshots that were not used: step, reason
  SnapshotStore snapshots_;
  WarmupCosine schedule_;
  GradientNoise noise_;
  std::optional<detail::FolderLock> lock_;  // from the first write on, on the first rank
  std::optional<RunLog> log_;
  int64_t step_ = 0;
  std::optional<StepChoice> planned_;
  int64_t planned_before_ = 0;  // the resumed run's micro-batch, until a plan exists; 0: the run had no plan
  std::string plan_to_save_;
  int64_t updates_ = 0;  // steps that were not skipped
  detail::SpikeWatch spikes_;
  std::string spike_;  // the reason why the last step is out of line
  int64_t spikes_in_a_row_ = 0;
  int64_t rollbacks_ = 0;              // since the newest snapshot was saved
  AsyncSnapshots saving_{snapshots_};  // last: saving ends before the lock is released
};

Trainer::Trainer(TrainConfig config, Start start, std::shared_ptr<ProcessGroup> group)
    : impl_(std::make_unique<Impl>(std::move(config), start, std::move(group))) {}
Trainer::~Trainer() = default;

TrainOutcome Trainer::run(const TrainCallbacks& callbacks) { return impl_->run(callbacks); }

}  // namespace snug
