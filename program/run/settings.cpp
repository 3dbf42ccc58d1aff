#include "program/run/settings.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <string>
#include <string_view>
#include <system_error>
#include <variant>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "snug/core.h"

namespace snug {
namespace {

// `data` is one setting, with the paths joined by line breaks. A log is UTF-8, but a path may be any bytes. A path that
// cannot be written literally is written with % and two digits for all but plain characters.
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

// --- reading and setting a member

template <auto Member>
using MemberOf = std::remove_reference_t<decltype(std::declval<TrainConfig&>().*Member)>;

template <auto Member>
LogValue get(const TrainConfig& config) {
  return config.*Member;
}

template <auto Member>
void set(TrainConfig& config, const LogValue& value) {
  config.*Member = std::get<MemberOf<Member>>(value);
}

// For a member that was not given, get() returns the result of Resolved().
template <auto Resolved>
LogValue get_resolved(const TrainConfig& config) {
  return (config.*Resolved)();
}

template <auto Member>
void set_optional(TrainConfig& config, const LogValue& value) {
  config.*Member = std::get<int64_t>(value);
}

template <auto Member>
LogValue get_name(const TrainConfig& config) {
  return std::string(to_string(config.*Member));
}

template <auto Member, auto FromString>
void set_name(TrainConfig& config, const LogValue& value) {
  config.*Member = FromString(std::get<std::string>(value));
}

LogValue get_data(const TrainConfig& config) { return join(config.data); }
void set_data(TrainConfig& config, const LogValue& value) { config.data = split(std::get<std::string>(value)); }

LogValue get_memory(const TrainConfig& config) {
  return config.memory.is_unlimited() ? std::string("unlimited") : std::to_string(config.memory.count());
}
void set_memory(TrainConfig& config, const LogValue& value) {
  const auto& text = std::get<std::string>(value);
  config.memory = text == "unlimited" ? Bytes::unlimited() : Bytes::parse(text);
}

LogValue get_checkpoint(const TrainConfig& config) { return std::string(to_string(config.checkpoint())); }

using T = TrainConfig;

constexpr std::array kSettings{
    Setting{
        "data", "--data", "PATH",
        "Files or folders of text; for a .pt2 model also .bin (16-bit tokens) or .safetensors; a tenth is held out; "
        "where it has moved, give it with --resume",
        get_data, set_data, std::nullopt, /*is_later=*/false, /*may_change_on_resume=*/true},
    Setting{
        "model", "--model", "NAME",
        "gpt-tiny (default), gpt-small, gpt-medium, gpt-base, or a file of torch.export (.pt2) that returns its loss",
        get<&T::model>, set<&T::model>, std::nullopt, /*is_later=*/false, /*may_change_on_resume=*/true},
    Setting{"batch", "--batch", "N", "Sequences, or other samples, per optimizer step (default 64)", get<&T::batch>,
            set<&T::batch>, 1},
    Setting{"micro_batch", "--micro-batch", "N|auto", "So many of them at a time; same gradients, less memory",
            get<&T::micro_batch>, set<&T::micro_batch>, 0},
    Setting{
        "memory", "--memory", "SIZE",
        "Most tensor memory, such as 300MiB: plans steps that stay below it; another one may be given with --resume",
        get_memory, set_memory, std::nullopt, /*is_later=*/false, /*may_change_on_resume=*/true},
    Setting{"precision", "--precision", "NAME", "float32 (default), bfloat16, float16 or auto (measured)",
            get_name<&T::precision>, set_name<&T::precision, precision_from_string>},
    Setting{"fp32_reductions",
            "--fp32-reductions",
            "",
            "In 16 bits on a CPU: softmax, norms, losses and sums in FP32",
            get<&T::fp32_reductions>,
            set<&T::fp32_reductions>,
            {},
            true},
    Setting{"weights", "--weights", "WHAT", "full: FP32 (default); low: 16-bit weights with FP32 masters",
            get_name<&T::weights>, set_name<&T::weights, weights_from_string>},
    Setting{"precision_guard", "--precision-guard", "N",
            "Compute the blocks in float32 after N steps of overflow or underflow (default: 20 with auto)",
            get_resolved<&T::guard_patience>, set_optional<&T::precision_guard>, 0},
    Setting{"checkpoint", "--checkpoint", "WHAT",
            "What backward computes again: none, blocks, or auto (default with --memory: what is needed)",
            get_checkpoint, set_name<&T::checkpointing, checkpointing_from_string>},
    Setting{"offload", "--offload", "",
            "Keep what backward needs in host memory, or with a CPU in a file in --out; with --memory: if planned, "
            "and so the optimizer's state",
            get<&T::offload>, set<&T::offload>},
    Setting{"optimizer",
            "--optimizer",
            "NAME",
            "adamw (default), adamw8bit (a quarter of its state; with --weights low in bfloat16, 3 bytes a weight in "
            "the place of masters and moments), adam, sgd (momentum 0.9), or muon",
            get_name<&T::optimizer>,
            set_name<&T::optimizer, optimizer_from_string>,
            {},
            true},
    Setting{"shard_optimizer", "--shard-optimizer", "",
            "Each of several ranks keeps its share of the optimizer's state", get<&T::shard_optimizer>,
            set<&T::shard_optimizer>},
    Setting{
        "shard_group", "--shard-group", "N",
        "With --memory, each N consecutive ranks share the model out, as on a machine with N ranks (default 0: all)",
        get<&T::shard_group>, set<&T::shard_group>, 0, /*is_later=*/true, /*may_change_on_resume=*/true},
    Setting{"lr", "--lr", "X", "Highest learning rate (default 0.001)", get<&T::lr>, set<&T::lr>},
    Setting{"lr_scaling", "--lr-scaling", "RULE",
            "How --lr, meant for a batch of 64, follows --batch: none (default), linear or sqrt",
            get_name<&T::lr_scaling>, set_name<&T::lr_scaling, lr_scaling_from_string>},
    Setting{"weight_decay", "", "X", "", get<&T::weight_decay>, set<&T::weight_decay>},
    Setting{"clip_norm", "", "X", "", get<&T::clip_norm>, set<&T::clip_norm>},
    Setting{"steps", "--steps", "N", "Optimizer steps (default 1000)", get<&T::steps>, set<&T::steps>, 1},
    Setting{"warmup_steps", "--warmup", "N", "Steps of rising learning rate, 0: none (default: a twentieth)",
            get_resolved<&T::warmup>, set_optional<&T::warmup_steps>, 0},
    Setting{"validate_every", "--validate-every", "N",
            "Steps between held-out losses, 0: at the end only (default: a twentieth)",
            get_resolved<&T::validation_interval>, set_optional<&T::validate_every>, 0},
    Setting{"snapshot_every", "--snapshot-every", "N", "Steps between snapshots, 0: at the end only (default: a tenth)",
            get_resolved<&T::snapshot_interval>, set_optional<&T::snapshot_every>, 0},
    Setting{"gradient_statistics_every", "--gradient-statistics", "N",
            "Steps between samples of the gradients' sizes, for the report", get<&T::gradient_statistics_every>,
            set<&T::gradient_statistics_every>, 0},
    Setting{"on_spike", "--on-spike", "WHAT",
            "Of a loss or gradients far above the last steps', or not finite: go-on (default), skip or roll-back",
            get_name<&T::on_spike>, set_name<&T::on_spike, on_spike_from_string>, std::nullopt, /*is_later=*/true},
    Setting{"async_snapshots", "--async-snapshots", "",
            "Write snapshots from a copy while training goes on; not where ranks share out the state",
            get<&T::async_snapshots>, set<&T::async_snapshots>, std::nullopt, /*is_later=*/true},
    Setting{"seed", "--seed", "N", "Of weights and data order (default 1)", get<&T::seed>, set<&T::seed>, 0},
    Setting{"device", "--device", "DEVICE",
            "cpu (default), cuda, cuda:1, or what else LibTorch finds; another one may be given with --resume",
            get<&T::device>, set<&T::device>, std::nullopt, /*is_later=*/false, /*may_change_on_resume=*/true},
};

}  // namespace

std::span<const Setting> settings() { return kSettings; }

}  // namespace snug
