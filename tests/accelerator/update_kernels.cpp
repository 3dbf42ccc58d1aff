#include "tests/accelerator/update_kernels.h"

#include "src/kernels/device_update.h"
#include "tests/kernels/one_lane_update.h"
#include "tests/support/sim_device/sim_device.h"
#include "tests/support/sim_device/sim_stream.h"

namespace snug::testing {
namespace {

int started = 0;

void launch(const kernels::UpdateTable& table, c10::Stream stream) {
  ++started;
  sim_device::enqueue(stream, sim_device::kOperatorSeconds, [table] { kernels::update_by_one_lane(table); });
}

}  // namespace

WithUpdateKernels::WithUpdateKernels() {
  started = 0;
  kernels::detail::set_update_launcher(sim_device::device().type(), &launch);
}

WithUpdateKernels::~WithUpdateKernels() { kernels::detail::set_update_launcher(sim_device::device().type(), nullptr); }

int WithUpdateKernels::launches() const { return started; }

}  // namespace snug::testing
