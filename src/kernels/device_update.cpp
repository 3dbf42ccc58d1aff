#include "src/kernels/device_update.h"

#include <array>
#include <atomic>

namespace snug::kernels::detail {
namespace {

std::atomic<UpdateLauncher>& launcher_of_tests(c10::DeviceType type) {
  static std::array<std::atomic<UpdateLauncher>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> launchers{};
  return launchers.at(static_cast<size_t>(type));
}

}  // namespace

UpdateLauncher update_launcher(c10::Device device) {
  return device.is_cuda() ? cuda_update_launcher(device) : launcher_of_tests(device.type()).load();
}

void set_update_launcher(c10::DeviceType type, UpdateLauncher launcher) { launcher_of_tests(type) = launcher; }

}  // namespace snug::kernels::detail
