#pragma once
// Autocast: runs matrix products and convolutions in a 16-bit type while the guard lives. The C++ twin of Python's
// torch.autocast. LibTorch has the switches but no guard. Switches set by hand leave stale low-precision copies of
// weights behind.
//
//   {
//     snug::Autocast autocast(torch::kCPU, torch::kBFloat16);
//     loss = criterion(model->forward(x), y);
//   }                       // the cache of cast weights is emptied here
//   loss.backward();

#include <vector>

#include <ATen/core/Tensor.h>

namespace snug {

struct AutocastOptions {
  /// false: autocast is off inside, for a region that must stay in the dtype of the inputs.
  bool enabled = true;
  /// Keep each weight's cast for further uses in the region. false: less memory, more casts.
  bool cache = true;
  /// On a CPU: run softmax, normalisations, losses, sums, norms, exponentials and the like in FP32, as autocast does on
  /// CUDA, instead of in the type of the inputs. 16-bit inputs are cast. Exceptions:
  /// - an operator with a `dtype` argument keeps the given type;
  /// - a batch normalisation whose running statistics are 16-bit is not cast.
  ///
  /// No effect on other devices. LibTorch's lists for other devices have most of these operators; CUDA's list has all
  /// but mean, batch_norm and rms_norm.
  bool fp32_reductions = false;
};

/// On construction sets this thread's autocast state for one device type; on destruction restores the state. At the
/// exit of the outermost guard the cast cache is cleared. Guards nest. Snug's optimizers and GradScaler::step clear the
/// cache too, so that a step inside the region does not leave casts stale. Gradients may be turned off and on inside:
/// LibTorch, from 2.11 on, casts weights with their history in either mode, so a change of mode needs no clearing.
class [[nodiscard]] Autocast final {
 public:
  /// Throws ConfigError unless `dtype` is kBFloat16 or kHalf and LibTorch has autocast for `device`.
  Autocast(c10::DeviceType device, c10::ScalarType dtype, AutocastOptions options = {});
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

  /// Forgets all cached casts. Call clear_cache after writing to weights by hand inside an Autocast region.
  static void clear_cache();

  /// For debugging, inside an Autocast region: throws Error, with the index, if a cached cast is older than the cast's
  /// weight, because the region goes on with the weight's old values. Waits for the device. Casts the weights that have
  /// no cast yet, and keeps a 16-bit copy of each until the region ends. Does nothing if autocast or the cache is off.
  static void check_cache(const std::vector<at::Tensor>& weights);

 private:
  c10::DeviceType device_;
  bool previous_enabled_;
  c10::ScalarType previous_dtype_;
  bool previous_cache_;
  bool previous_fp32_reductions_;
};

}  // namespace snug
