#pragma once
// Plans on the simulated accelerator that offload.

#include <cstddef>

#include "snug/plan.h"
#include "src/planner/profile.h"
#include "src/planner/stay.h"
#include "tests/support/sim_device/sim_device.h"

namespace snug::testing::offload_plans {

/// To pinned memory, at the speed of the simulated device.
inline OffloadLink link() {
  return {.kind = OffloadLink::Kind::Pinned,
          .out_bytes_per_second = sim_device::kBytesPerSecond,
          .back_bytes_per_second = sim_device::kBytesPerSecond};
}

/// Every storage goes `way`, which may be impossible for some.
inline plan::Stays all_leaving(const plan::Profile& profile, plan::Stay way) {
  plan::Stays plan(profile.storages.size(), plan::Stay::kept());
  for (size_t s = 0; s < plan.size(); ++s) {
    plan[s] = profile.storages[s].bytes > 0 ? way : plan::Stay::kept();
  }
  return plan;
}

}  // namespace snug::testing::offload_plans
