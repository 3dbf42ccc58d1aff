#include "snug/train/config.h"

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <string_view>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "snug/core/error.h"

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

double TrainConfig::peak_lr() const { return scale_learning_rate(lr, batch, kBaseBatch, lr_scaling); }

namespace {

// data is one setting, its paths joined by line breaks, and a log is UTF-8, but a path may be any bytes. One that cannot stand there as it is is
// written with % and two digits for all but plain ones.
constexpr char kPathSeparator = '\n';
constexpr std::string_view kEncoded = "percent-encoded:";

bool is_utf8(const std::string& text) {
  try {
    (void)nlohmann::json(text).dump();
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

std::string encoded(const std::string& path) {
  if (is_utf8(path) && path.find(kPathSeparator) == std::string::npos && !path.starts_with(kEncoded)) {
    return path;
  }
  std::string text(kEncoded);
  for (const char letter : path) {
    const bool is_plain = letter > ' ' && letter < 127 && letter != '%';
    text += is_plain ? std::string(1, letter) : fmt::format("%{:02x}", static_cast<unsigned char>(letter));
  }
  return text;
}

std::string decoded(const std::string& text) {
  if (!text.starts_with(kEncoded)) {
    return text;
  }
  std::string path;
  for (size_t i = kEncoded.size(); i < text.size(); ++i) {
    unsigned char byte = static_cast<unsigned char>(text[i]);
    if (text[i] == '%') {
      const char* const digits = text.data() + i + 1;
      const char* const end = text.data() + std::min(i + 3, text.size());
      if (const auto read = std::from_chars(digits, end, byte, 16); read.ec != std::errc() || read.ptr != digits + 2) {
        throw CorruptFile(
            fmt::format("TrainConfig: the setting 'data' in the run log has '{}', which is no path", text));
      }
      i += 2;
    }
    path += static_cast<char>(byte);
  }
  return path;
}

std::string join(const std::vector<std::filesystem::path>& paths) {
  std::string joined;
  for (const auto& path : paths) {
    joined += (joined.empty() ? "" : std::string(1, kPathSeparator)) + encoded(path.string());
  }
  return joined;
}

std::vector<std::filesystem::path> split(const std::string& joined) {
  std::vector<std::filesystem::path> paths;
  size_t begin = 0;
  while (begin <= joined.size()) {
    const size_t end = std::min(joined.find(kPathSeparator, begin), joined.size());
    paths.emplace_back(decoded(joined.substr(begin, end - begin)));
    begin = end + 1;
  }
  return paths;
}

template <class T>
T setting(const LogValues& settings, const std::string& name) {
  for (const auto& [key, value] : settings) {
    if (key == name) {
      if (const auto* typed = std::get_if<T>(&value)) {
        return *typed;
      }
      throw CorruptFile(fmt::format("TrainConfig: the setting '{}' in the run log has the wrong type", name));
    }
  }
  throw CorruptFile(
      fmt::format("TrainConfig: the run log has no setting '{}'; was it written by another version of snug?", name));
}

void at_least(const char* name, int64_t value, int64_t least) {
  if (value < least) {
    throw ConfigError(fmt::format("train: {} is {}; it must be at least {}", name, value, least));
  }
}

int64_t part_of(int64_t steps, int64_t times) { return std::max<int64_t>(1, steps / times); }

}  // namespace

Checkpointing TrainConfig::checkpoint() const {
  const bool plans = !memory.is_unlimited() && device == "cpu";
  return checkpointing.value_or(plans ? Checkpointing::Auto : Checkpointing::None);
}
int64_t TrainConfig::warmup() const { return warmup_steps.value_or(part_of(steps, 20)); }
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
  at_least("batch", batch, 1);
  at_least("micro_batch", micro_batch, 0);
  at_least("steps", steps, 1);
  at_least("warmup_steps", warmup(), 0);
  at_least("validate_every", validation_interval(), 0);
  at_least("snapshot_every", snapshot_interval(), 0);
  at_least("precision_guard", guard_patience(), 0);
  at_least("gradient_statistics_every", gradient_statistics_every, 0);
  at_least("seed", seed, 0);
  if (weights == Weights::Low && (precision == Precision::Float32 || precision == Precision::Auto)) {
    throw ConfigError(
        fmt::format("train: weights low goes with precision float16 or bfloat16, not with {}", to_string(precision)));
  }
  if (guard_patience() > 0 && precision == Precision::Float32) {
    throw ConfigError(
        "train: precision_guard has nothing to guard in float32; give another precision, or leave it out");
  }
  if (checkpoint() == Checkpointing::Auto && (memory.is_unlimited() || device != "cpu")) {
    throw ConfigError(
        "train: checkpoint auto keeps a memory limit by what it computes again; it needs one, on the CPU");
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
  return {
      {"data", join(data)},
      {"model", model},
      {"batch", batch},
      {"micro_batch", micro_batch},
      {"memory", memory.is_unlimited() ? std::string("unlimited") : fmt::format("{}", memory.count())},
      {"precision", std::string(to_string(precision))},
      {"weights", std::string(to_string(weights))},
      {"precision_guard", guard_patience()},
      {"checkpoint", std::string(to_string(checkpoint()))},
      {"offload", offload},
      {"shard_optimizer", shard_optimizer},
      {"lr", lr},
      {"lr_scaling", std::string(to_string(lr_scaling))},
      {"weight_decay", weight_decay},
      {"clip_norm", clip_norm},
      {"steps", steps},
      {"warmup_steps", warmup()},
      {"validate_every", validation_interval()},
      {"snapshot_every", snapshot_interval()},
      {"gradient_statistics_every", gradient_statistics_every},
      {"seed", seed},
      {"device", device},
  };
}

TrainConfig TrainConfig::from_settings(const LogValues& settings, std::filesystem::path out) {
  const auto memory = setting<std::string>(settings, "memory");
  return {
      .data = split(setting<std::string>(settings, "data")),
      .out = std::move(out),
      .model = setting<std::string>(settings, "model"),
      .batch = setting<int64_t>(settings, "batch"),
      .micro_batch = setting<int64_t>(settings, "micro_batch"),
      .memory = memory == "unlimited" ? Bytes::unlimited() : Bytes::parse(memory),
      .precision = precision_from_string(setting<std::string>(settings, "precision")),
      .weights = weights_from_string(setting<std::string>(settings, "weights")),
      .precision_guard = setting<int64_t>(settings, "precision_guard"),
      .checkpointing = checkpointing_from_string(setting<std::string>(settings, "checkpoint")),
      .offload = setting<bool>(settings, "offload"),
      .shard_optimizer = setting<bool>(settings, "shard_optimizer"),
      .lr = setting<double>(settings, "lr"),
      .lr_scaling = lr_scaling_from_string(setting<std::string>(settings, "lr_scaling")),
      .weight_decay = setting<double>(settings, "weight_decay"),
      .clip_norm = setting<double>(settings, "clip_norm"),
      .steps = setting<int64_t>(settings, "steps"),
      .warmup_steps = setting<int64_t>(settings, "warmup_steps"),
      .validate_every = setting<int64_t>(settings, "validate_every"),
      .snapshot_every = setting<int64_t>(settings, "snapshot_every"),
      .gradient_statistics_every = setting<int64_t>(settings, "gradient_statistics_every"),
      .seed = setting<int64_t>(settings, "seed"),
      .device = setting<std::string>(settings, "device"),
  };
}

}  // namespace snug
