#pragma once
// sample_text: lets a byte-level Gpt continue a text.
//
//   std::string play = snug::sample_text(model, "HAMLET.\n", {.count = 400, .temperature = 0.8});

#include <cstdint>
#include <string>
#include <string_view>

#include "program/models/gpt.h"

namespace snug {

struct SampleOptions {
  int64_t count = 256;       ///< bytes to write
  double temperature = 1.0;  ///< below 1: likelier bytes are preferred; 0: always the likeliest
  int64_t top_k = 0;         ///< only the top_k likeliest bytes; 0: all
  uint64_t seed = 0;         ///< of a generator of its own: torch's default generator is not touched
};

/// Returns the `count` bytes that follow `prompt` (without the prompt). The bytes need not be valid UTF-8. Runs without
/// gradients and dropout, and restores the model's mode afterwards. Only the last `context` bytes are used. An empty
/// prompt counts as a line break. Throws ConfigError if the model's vocabulary is not 256, or for options out of range;
/// NonFinite if the model's logits are not finite.
std::string sample_text(Gpt model, std::string_view prompt, SampleOptions options = {});

}  // namespace snug
