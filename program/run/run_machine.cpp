#include "program/run/run_machine.h"

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <fmt/format.h>
#include <torch/version.h>

namespace snug::detail {
namespace {

constexpr const char *kName = "machine", *kDevice = "device";

}  // namespace

RunEvent machine_event(int64_t step, int64_t ranks, c10::Device device) {
  return {.name = kName,
          .step = step,
          .details = {{"ranks", ranks},
                      {"threads", int64_t{at::get_num_threads()}},
                      {"libtorch", std::string(TORCH_VERSION)},
                      {"cpu_capability", at::get_cpu_capability()},
                      {kDevice, device.str()}}};
}

LogValues machine_after(const RunHistory& log, int64_t step) {
  const RunEvent* event = newest_event(log, kName, step);
  return event == nullptr ? LogValues{} : event->details;
}

std::vector<std::string> machine_changes(const RunHistory& log, const RunEvent& now) {
  const LogValues before = machine_after(log, now.step - 1);
  std::vector<std::string> changes;
  for (const auto& [name, value] : now.details) {
    const LogValue* was = find_value(before, name);
    if (was != nullptr && *was != value) {
      const char* const more = name == kDevice ? ", where random numbers are others" : "";
      changes.push_back(fmt::format("{} {}, not {}{}", name, text_of(value), text_of(*was), more));
    }
  }
  return changes;
}

}  // namespace snug::detail
