#include "snug/run/detail/run_machine.h"

#include <algorithm>
#include <string_view>
#include <variant>

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <fmt/format.h>
#include <torch/version.h>

namespace snug::detail {
namespace {

constexpr std::string_view kName = "machine";

std::string str(const LogValue& value) {
  return std::visit([](const auto& v) { return fmt::format("{}", v); }, value);
}

}  // namespace

RunEvent machine_event(int64_t step, const TrainConfig& config, int64_t ranks, const Stepper& stepper) {
  const bool is_chosen = config.micro_batch == 0 && config.checkpoint() == Checkpointing::Auto;
  const int64_t given = config.micro_batch == 0 ? config.batch : config.micro_batch;
  return {.name = std::string(kName),
          .step = step,
          .details = {{"ranks", ranks},
                      {"threads", int64_t{at::get_num_threads()}},
                      {"libtorch", std::string(TORCH_VERSION)},
                      {"cpu", at::get_cpu_capability()},
                      {"device", config.device},
                      {"precision", std::string(to_string(stepper.precision()))},
                      {"micro_batch", is_chosen ? "chosen for " + config.memory.str() : std::to_string(given)}}};
}

std::vector<std::string> other_than_before(const RunEvent& machine, const std::vector<RunEvent>& events) {
  const auto before =
      std::find_if(events.rbegin(), events.rend(), [](const RunEvent& event) { return event.name == kName; });
  std::vector<std::string> all;
  if (before == events.rend()) {
    return all;
  }
  for (const auto& [name, value] : machine.details) {
    const auto was = std::find_if(before->details.begin(), before->details.end(),
                                  [&name = name](const auto& detail) { return detail.first == name; });
    if (was != before->details.end() && was->second != value) {
      all.push_back(fmt::format("{} {}, not {}", name, str(value), str(was->second)));
    }
  }
  return all;
}

}  // namespace snug::detail
