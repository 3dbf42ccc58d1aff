#include "snug/run/detail/run_machine.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <variant>

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <c10/core/DeviceType.h>
#include <fmt/format.h>
#include <torch/version.h>

namespace snug::detail {
namespace {

constexpr std::string_view kName = "machine", kDevice = "device";

const LogValue* find(const LogValues& values, std::string_view name) {
  const auto found = std::find_if(values.begin(), values.end(), [&](const auto& one) { return one.first == name; });
  return found == values.end() ? nullptr : &found->second;
}

// The newest of a step before `end`.
const RunEvent* newest_before(const RunHistory& log, int64_t end) {
  const auto found = std::find_if(log.events.rbegin(), log.events.rend(),
                                  [&](const RunEvent& event) { return event.name == kName && event.step < end; });
  return found == log.events.rend() ? nullptr : &*found;
}

}  // namespace

RunEvent machine_event(int64_t step, int64_t ranks, c10::Device device) {
  return {.name = std::string(kName),
          .step = step,
          .details = {{"ranks", ranks},
                      {"threads", int64_t{at::get_num_threads()}},
                      {"libtorch", std::string(TORCH_VERSION)},
                      {"cpu_capability", at::get_cpu_capability()},
                      {std::string(kDevice), c10::DeviceTypeName(device.type(), /*lower_case=*/true)}}};
}

LogValues newest_machine(const RunHistory& log) {
  const RunEvent* newest = newest_before(log, std::numeric_limits<int64_t>::max());
  return newest == nullptr ? LogValues{} : newest->details;
}

LogValues machine_of_step(const RunHistory& log, int64_t step) {
  if (step == 0) {
    return {};
  }
  if (const RunEvent* event = newest_before(log, step)) {
    return event->details;
  }
  const auto* device = std::get_if<std::string>(find(log.settings, kDevice));
  return device == nullptr ? LogValues{} : LogValues{{std::string(kDevice), device->substr(0, device->find(':'))}};
}

std::vector<std::string> machine_changes(const LogValues& before, const LogValues& now) {
  std::vector<std::string> changes;
  for (const auto& [name, value] : now) {
    const LogValue* was = find(before, name);
    if (was != nullptr && *was != value) {
      changes.push_back(fmt::format("{} {}, not {}", name, to_string(value), to_string(*was)));
    }
  }
  return changes;
}

}  // namespace snug::detail
