#pragma once
// GradientsOutside: gradients that are collected in files (AllocationsInFile), or in the host's memory for parameters
// of a device. A gradient leaves when backward has completed the gradient, and is added to the gradients of earlier
// backward passes there, by the CPU. The addition is rounded as on the device: both round the exact sum of two numbers
// to the type of the gradient. The sum becomes the parameter's gradient, on the CPU, when the gradients are lent.
//
// From a device, gradients leave one at a time on a stream of their own, while backward goes on. The memory of a
// gradient is released when the next gradient leaves or backward ends, in the order of the stream that computed the
// gradient, which waits for the copy first. So the bytes of a step do not depend on the speed of the link.

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include "src/core/gradient_hooks.h"

namespace snug::detail {

class GradientsOutside {
 public:
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;
  /// A parameter, and the parameter that gets the gradient: the same one, or its FP32 master.
  using Collected = std::pair<at::Tensor, at::Tensor>;

  GradientsOutside() = default;
  GradientsOutside(const GradientsOutside&) = delete;
  GradientsOutside& operator=(const GradientsOutside&) = delete;

  /// From here on, gradients of `parameters` are collected, without those that were collected before. Other parameters
  /// keep no sum. `parameters` must have no gradient hooks. `directory`: of the files; none: gradients go to
  /// page-locked memory. Throws Error if files cannot be made or the host has too little memory, and as an allocation
  /// does; then nothing is collected.
  void collect(const std::vector<Collected>& parameters, const std::optional<std::filesystem::path>& directory);
  /// The collected gradients become the gradients of `parameters`, which get them (true), or stop being the gradients
  /// (false). Waits until all gradients have left.
  void lend(const NamedTensors& parameters, bool lent);
  /// Gradients of later backward passes are added to the parameters' own gradients, as in plain training.
  void stop() { hooks_.reset(); }
  /// Stops, and drops the collected gradients.
  void drop();

 private:
  struct Gradient {
    at::Tensor sum;
    bool is_there = false;
  };
  // A gradient on the way to the host. Without `add` the copy goes to the gradient's place.
  struct Leaving {
    at::Tensor gradient;
    c10::Stream computing;
    c10::Event copied;
    std::function<void()> add;
  };

  void add(Gradient& to, const at::Tensor& parameter);
  void send(Gradient& to, at::Tensor& from, bool is_first);
  void receive();
  void forget() noexcept;
  void receive_all();

  std::unordered_map<const void*, Gradient> gradients_;  // by the parameter that gets the gradient
  std::optional<c10::Stream> copies_;                    // of a device
  at::Tensor passing_;                                   // on the host, for gradients that the CPU adds
  std::optional<Leaving> leaving_;
  std::unique_ptr<GradientHooks> hooks_;
};

}  // namespace snug::detail
