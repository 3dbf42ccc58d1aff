#pragma once
// The network and the data of sine and cosine: a trunk shared by two heads, one head for the sine, one for the cosine.
// `snug compare sin-cos` and benchmarks/sin_cos train the network.

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <c10/core/Device.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include "snug/precision.h"

namespace snug::measure {

/// 1 -> width -> width -> width with ReLU after each; each head Linear(width, width), ReLU, Linear(width, 1).
class TwoTasksImpl : public torch::nn::Module {
 public:
  explicit TwoTasksImpl(int64_t width);
  /// [N, 1] -> [N, 2]: sine, cosine.
  at::Tensor forward(const at::Tensor& x);

  torch::nn::Sequential trunk{nullptr};
  torch::nn::Sequential sine{nullptr};
  torch::nn::Sequential cosine{nullptr};
};
TORCH_MODULE(TwoTasks);

/// x: `points` of linspace(-2 pi, 2 pi), permuted, [N, 1]; y: sin x and cos x with uniform noise in [-0.01, 0.01], [N,
/// 2]. The numbers are the same on every device.
struct TwoTasksData {
  at::Tensor x, y;
};
TwoTasksData two_tasks_data(int64_t points, c10::Device device);

/// Mean squared error of the sine plus mean squared error of the cosine, in FP32.
at::Tensor two_tasks_loss(const at::Tensor& output, const at::Tensor& target);

inline constexpr int64_t kTwoTasksWidth = 150;
inline constexpr double kTwoTasksRate = 0.01;

/// A way of training. A call of epoch() is one step over all points, and returns the loss on request.
struct Way {
  std::string name;
  std::function<double(bool wants_loss)> epoch;
  std::shared_ptr<TwoTasks> model = {};
  c10::Device device = c10::Device(c10::DeviceType::CPU);

  double seconds_of_epochs(int64_t epochs) const;
};

/// The loop of the articles, on the device of the data: torch's Adam, the whole batch at once; in 16 bits by autocast.
Way articles_loop(std::string name, const TwoTasksData& data, int64_t width, std::optional<c10::ScalarType> autocast);

/// The same mathematics through the Stepper: micro-batches that stay in the caches, and an optimizer that reads each
/// weight once.
Way stepper_loop(std::string name, const TwoTasksData& data, int64_t width, Precision precision, int64_t micro_batch);

/// Of a few sizes, the size with the fastest epochs through the Stepper when all sizes take turns.
int64_t fastest_micro_batch(const TwoTasksData& data, int64_t width, Precision precision);

}  // namespace snug::measure
