#pragma once
// Autocast: run matrix products and convolutions in a 16-bit type while the guard lives. The C++ twin of Python's torch.autocast;
// LibTorch has the switches but no guard, and setting them by hand leaves stale low-precision copies of weights behind.
//
//   {
//     snug::Autocast autocast(torch::kCPU, torch::kBFloat16);
//     loss = criterion(model->forward(x), y);
//   }                       // the cache of cast weights is emptied here
//   loss.backward();

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace snug {

struct AutocastOptions {
  /// false: autocast is off inside, for a region that must stay in the dtype of its inputs.
  bool enabled = true;
  /// Keep each weight's cast for further uses in the region. Off: less memory, more casts.
  bool cache = true;
};

/// On construction sets this thread's autocast state for one device type, on destruction restores it; at the exit of the outermost
/// guard the cast cache is cleared. Guards nest. Snug's optimizers and GradScaler::step clear the cache too, so that a step inside
/// the region does not leave weights stale.
class [[nodiscard]] Autocast final {
 public:
  /// Throws ConfigError unless `dtype` is kBFloat16 or kHalf and LibTorch has autocast for `device`.
  Autocast(c10::DeviceType device, c10::ScalarType dtype, AutocastOptions options = {});
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  c10::DeviceType device_;
  bool previous_enabled_;
  c10::ScalarType previous_dtype_;
  bool previous_cache_;
};

/// Forgets all cached casts. Call it after writing to weights by hand inside an Autocast region.
void clear_autocast_cache();

}  // namespace snug
