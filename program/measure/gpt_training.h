#pragma once
// GPTs that train within a number of bytes, in several ways, and the largest such GPT.
//
//   const GptSizes sizes{.limit = 1 << 30, .layers = 12, .context = 256, .batch = 8};
//   const GptWay way{.name = "micro-batches of 1", .splits = true};
//   const GptMeasured found = measure_gpt(way, sizes, widest_gpt(way, sizes, 32));

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>

#include <c10/core/Device.h>
#include <torch/optim/optimizer.h>

#include "program/models/gpt.h"
#include "snug/memory.h"
#include "snug/step_in_backward.h"
#include "snug/stepper.h"

namespace snug::measure {

struct GptSizes {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  int64_t limit = 0;  ///< bytes of all live tensors of the device
  int64_t layers = 0, context = 0;
  int64_t batch = 0;                     ///< sequences of a step
  int64_t width_unit = 32;               ///< widths are multiples of the unit, and heads have 32 numbers
  std::filesystem::path directory = {};  ///< of the files of ways with files
};

/// Without any flag: plain LibTorch with torch::optim::AdamW, the batch at once.
struct GptWay {
  const char* name = "";
  bool splits = false;               ///< a Stepper with micro-batches of one sequence, and snug's AdamW
  bool checkpoints = false;          ///< each block is a checkpointed region
  bool eight_bits = false;           ///< AdamW8bit instead of AdamW
  bool has_split_weights = false;    ///< weights in BF16, and the lower bits in the state of AdamW8bit
  bool updates_in_backward = false;  ///< by snug's optimizer; the batch at once
  bool plans = false;                ///< the Stepper plans for the limit
  bool state_in_file = false;
  bool all_in_files = false;  ///< weights, gradients and state
};

class GptTraining {
 public:
  GptTraining(const GptWay& way, const GptSizes& sizes, int64_t width);

  /// Returns the mean loss. `tokens`: [sequences, time].
  double step(const at::Tensor& tokens);

  const Gpt& model() const { return model_; }
  const torch::optim::Optimizer& optimizer() const { return *optimizer_; }

 private:
  at::Tensor loss_of(const at::Tensor& tokens);

  Gpt model_{nullptr};
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::optional<StepInBackward> in_backward_;
  std::unique_ptr<Stepper> stepper_;
};

/// Random tokens, at most sizes.context a sequence, on the device.
at::Tensor gpt_tokens(const GptSizes& sizes, int64_t sequences, int64_t time);

/// Whether a GPT of that width trains within the limit.
bool gpt_trains(const GptWay& way, const GptSizes& sizes, int64_t width);

/// The largest width that trains, from a width that trains.
int64_t widest_gpt(const GptWay& way, const GptSizes& sizes, int64_t from);

struct GptMeasured {
  int64_t parameters = 0;
  int64_t peak_bytes = 0;  ///< of all live tensors, in a step
  double seconds = 0;      ///< of one step
  double tokens_per_second = 0;
  MemoryMeter::Report memory = {};  ///< of the step
};

/// A step of the whole batch under the limit, after a step that makes the optimizer's state and the plan.
GptMeasured measure_gpt(const GptWay& way, const GptSizes& sizes, int64_t width);

}  // namespace snug::measure
