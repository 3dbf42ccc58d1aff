#include "program/run/config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <initializer_list>
#include <string_view>

#include <fmt/format.h>

#include "program/run/run_model.h"
#include "program/run/settings.h"
#include "snug/core.h"

namespace snug {

namespace {

template <class E>
E from_string(std::string_view what, std::string_view name, std::initializer_list<E> values) {
  std::string known;
  for (const E value : values) {
    if (to_string(value) == name) {
      return value;
    }
    known += (known.empty() ? "" : ", ") + std::string(to_string(value));
  }
  throw ConfigError(fmt::format("{}: '{}' is unknown; give one of {}", what, name, known));
}

}  // namespace

std::string_view to_string(Checkpointing checkpointing) {
  return checkpointing == Checkpointing::None ? "none" : checkpointing == Checkpointing::Blocks ? "blocks" : "auto";
}
Checkpointing checkpointing_from_string(std::string_view name) {
  return from_string("checkpoint", name, {Checkpointing::None, Checkpointing::Blocks, Checkpointing::Auto});
}

std::string_view to_string(OptimizerChoice optimizer) {
  constexpr std::array<std::string_view, 5> kNames{"adamw", "adamw8bit", "adam", "sgd", "muon"};
  return kNames.at(static_cast<size_t>(optimizer));
}
OptimizerChoice optimizer_from_string(std::string_view name) {
  using enum OptimizerChoice;
  return from_string("optimizer", name, {AdamW, AdamW8bit, Adam, Sgd, Muon});
}

std::string_view to_string(OnSpike what) {
  return what == OnSpike::GoOn ? "go-on" : what == OnSpike::Skip ? "skip" : "roll-back";
}
OnSpike on_spike_from_string(std::string_view name) {
  return from_string("on-spike", name, {OnSpike::GoOn, OnSpike::Skip, OnSpike::RollBack});
}

std::string_view to_string(Weights weights) { return weights == Weights::Full ? "full" : "low"; }
Weights weights_from_string(std::string_view name) {
  return from_string("weights", name, {Weights::Full, Weights::Low});
}

std::string_view to_string(LrScaling scaling) {
  return scaling == LrScaling::None ? "none" : scaling == LrScaling::Linear ? "linear" : "sqrt";
}
LrScaling lr_scaling_from_string(std::string_view name) {
  return from_string("lr-scaling", name, {LrScaling::None, LrScaling::Linear, LrScaling::Sqrt});
}

double scale_learning_rate(double base_lr, int64_t batch, int64_t base_batch, LrScaling scaling) {
  if (!(std::isfinite(base_lr) && base_lr > 0)) {
    throw ConfigError(fmt::format("scale_learning_rate: base_lr is {}; give a finite learning rate above 0", base_lr));
  }
  if (batch < 1) {
    throw ConfigError(
        fmt::format("scale_learning_rate: batch is {}; give the items per optimizer step, at least 1", batch));
  }
  if (base_batch < 1) {
    throw ConfigError(
        fmt::format("scale_learning_rate: base_batch is {}; give the batch size that base_lr was tuned for, at least 1",
                    base_batch));
  }
  const double ratio = static_cast<double>(batch) / static_cast<double>(base_batch);
  switch (scaling) {
    case LrScaling::None:
      return base_lr;
    case LrScaling::Linear:
      return base_lr * ratio;
    case LrScaling::Sqrt:
      return base_lr * std::sqrt(ratio);
  }
  throw ConfigError(
      fmt::format("scale_learning_rate: scaling is {}; give None, Linear or Sqrt", static_cast<int>(scaling)));
}

double TrainConfig::peak_lr() const { return scale_learning_rate(lr, batch, kBaseBatch, lr_scaling); }

namespace {

int64_t part_of(int64_t steps, int64_t times) { return std::max<int64_t>(1, steps / times); }

}  // namespace

Checkpointing TrainConfig::checkpoint() const {
  return checkpointing.value_or(memory.is_unlimited() ? Checkpointing::None : Checkpointing::Auto);
}
int64_t TrainConfig::warmup() const { return warmup_steps.value_or(part_of(steps, 20)); }
bool TrainConfig::splits_weights() const {
  return optimizer == OptimizerChoice::AdamW8bit && weights == Weights::Low && precision == Precision::BFloat16;
}

int64_t TrainConfig::guard_patience() const {
  return precision_guard.value_or(precision == Precision::Auto ? PrecisionGuardOptions::kPatienceOfAuto : 0);
}
int64_t TrainConfig::validation_interval() const { return validate_every.value_or(part_of(steps, 20)); }
int64_t TrainConfig::snapshot_interval() const { return snapshot_every.value_or(part_of(steps, 10)); }

void TrainConfig::check() const {
  if (data.empty()) {
    throw ConfigError("train: no data; give files or folders of text with --data");
  }
  if (out.empty()) {
    throw ConfigError("train: no run folder; give one with --out");
  }
  for (const Setting& setting : settings()) {
    const LogValue value = setting.get(*this);
    if (setting.least && std::get<int64_t>(value) < *setting.least) {
      throw ConfigError(fmt::format("train: {} is {}; it must be at least {}", setting.name, std::get<int64_t>(value),
                                    *setting.least));
    }
  }
  if (weights == Weights::Low && (precision == Precision::Float32 || precision == Precision::Auto)) {
    throw ConfigError(
        fmt::format("train: weights low goes with precision float16 or bfloat16, not with {}", to_string(precision)));
  }
  if (optimizer == OptimizerChoice::Muon && is_exported(model)) {
    throw ConfigError(fmt::format(
        "train: optimizer muon is not for embeddings and output layers, and an exported model such as {} does not say "
        "which they are; give another optimizer",
        model));
  }
  if (guard_patience() > 0 && precision == Precision::Float32) {
    throw ConfigError(
        "train: precision_guard has nothing to guard in float32; give another precision, or leave it out");
  }
  if (fp32_reductions && precision == Precision::Float32) {
    throw ConfigError(
        "train: fp32_reductions changes nothing in float32, where all is FP32; give another precision, or leave it out");
  }
  if (checkpoint() == Checkpointing::Auto && memory.is_unlimited()) {
    throw ConfigError("train: checkpoint auto keeps a memory limit by what it computes again; give one with --memory");
  }
  if (micro_batch > batch) {
    throw ConfigError(
        fmt::format("train: micro_batch {} is larger than batch {}; give at most {}", micro_batch, batch, batch));
  }
  if (warmup() > steps) {
    throw ConfigError(fmt::format("train: warmup_steps {} is more than the {} steps of the run; give at most {}",
                                  warmup(), steps, steps));
  }
  if (!(lr > 0) || !(weight_decay >= 0) || !(clip_norm >= 0)) {
    throw ConfigError(
        fmt::format("train: lr is {}, weight_decay {}, clip_norm {}; the first must be > 0, the others >= 0", lr,
                    weight_decay, clip_norm));
  }
}

LogValues TrainConfig::to_settings() const {
  LogValues values;
  for (const Setting& setting : settings()) {
    values.emplace_back(setting.name, setting.get(*this));
  }
  return values;
}

TrainConfig TrainConfig::from_settings(const LogValues& saved, std::filesystem::path out) {
  TrainConfig config{.out = std::move(out)};
  for (const Setting& setting : settings()) {
    const LogValue* found = find_value(saved, setting.name);
    if (found == nullptr && setting.is_later) {
      continue;
    }
    if (found == nullptr) {
      throw CorruptFile(fmt::format(
          "TrainConfig: the run log has no setting '{}'; was it written by another version of snug?", setting.name));
    }
    if (found->index() != setting.get(config).index()) {
      throw CorruptFile(fmt::format("TrainConfig: the setting '{}' in the run log has the wrong type", setting.name));
    }
    setting.set(config, *found);
  }
  return config;
}

}  // namespace snug
