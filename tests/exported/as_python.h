#pragma once
// Training an exported model as with_models.py trained it in Python, and comparing all that it tells of that.

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/state.h"
#include "tests/exported/exported_files.h"
#include "tests/support/tensors.h"

namespace snug::testing {

/// The models of zoo.py. They have a run of their own: --gtest_filter='Zoo/*'.
inline auto zoo() {
  return ::testing::Values("lstm", "densenet", "mobilenet", "swin", "vit", "convnext", "gpt2", "llama", "bert", "t5");
}

inline void expect_known(const ExportedCase& known, const std::string& name, const at::Tensor& found) {
  ASSERT_TRUE(known.known.contains(name)) << name;
  EXPECT_TRUE(same_bits(found, known.known.at(name))) << name;
}

inline void expect_gradients(const ExportedCase& test, const std::string& batches) {
  for (const auto& parameter : test.model->named_parameters()) {
    const std::string name = batches + ".gradient." + parameter.key();
    const at::Tensor& gradient = parameter.value().grad();
    if (gradient.defined() || test.known.contains(name)) {
      expect_known(test, name, gradient);
    }
  }
}

inline void expect_optimizer(const ExportedCase& test, const std::string& batches, const StateDict& saved) {
  size_t found = 0;
  for (const auto& [index, parameter] : saved.get<StateDict>("state").entries()) {
    for (const auto& [name, value] : std::get<StateDict>(parameter).entries()) {
      expect_known(test, batches + ".optimizer." + index + "." + name, std::get<at::Tensor>(value));
      ++found;
    }
  }
  const auto of_optimizer = [&](const auto& known) { return known.first.starts_with(batches + ".optimizer."); };
  EXPECT_EQ(found, std::ranges::count_if(test.known, of_optimizer));
}

/// Makes an optimizer step on a batch and returns its loss.
using TrainStep = std::function<at::Tensor(const std::vector<at::Tensor>& batch)>;

/// Trains on the batches of this name ("same", "other", "micro") and expects Python's losses, gradients, weights,
/// buffers, optimizer state and random generator, to the bit.
inline void train_as_python(ExportedCase& test, const std::string& batches, const AdamW& optimizer,
                            const TrainStep& train) {
  torch::manual_seed(1234);
  for (int step = 0; step < 4; ++step) {
    expect_known(test, batches + ".loss" + std::to_string(step), train(test.inputs(step, batches)));
    if (step == 0) {
      expect_gradients(test, batches);
    }
  }
  for (const auto& [name, tensor] : test.model->state_dict()) {
    expect_known(test, batches + ".state." + name, tensor);
  }
  expect_optimizer(test, batches, optimizer.state_dict());
  expect_known(test, batches + ".generator", at::globalContext().defaultGenerator(at::kCPU).get_state());
}

}  // namespace snug::testing
