#include "program/models/sample_text.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/topk.h>
#include <fmt/format.h>

#include "snug/core.h"

namespace snug {
namespace {

constexpr int64_t kBytes = 256;

// Turns dropout off, and restores the model's mode at the end.
class [[nodiscard]] EvaluationMode final {
 public:
  explicit EvaluationMode(torch::nn::Module& module) : module_(module), was_training_(module.is_training()) {
    module_.eval();
  }
  ~EvaluationMode() { module_.train(was_training_); }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  torch::nn::Module& module_;
  bool was_training_;
};

void check(const GptImpl& model, const SampleOptions& options) {
  if (model.options.vocab != kBytes) {
    throw ConfigError(fmt::format(
        "sample_text: the model's vocabulary is {}, not the 256 bytes; use a byte-level model", model.options.vocab));
  }
  if (options.count < 0 || options.top_k < 0) {
    throw ConfigError(
        fmt::format("sample_text: count is {}, top_k is {}; give numbers >= 0", options.count, options.top_k));
  }
  if (!std::isfinite(options.temperature) || options.temperature < 0) {
    throw ConfigError(fmt::format("sample_text: temperature is {}; give a finite number >= 0", options.temperature));
  }
}

// One byte from logits [256], FP32 on the CPU.
int64_t choose(at::Tensor logits, const SampleOptions& options, at::Generator& generator) {
  if (!logits.isfinite().all().item<bool>()) {
    throw NonFinite("sample_text: the model's logits are not finite; did its training diverge?");
  }
  if (options.temperature == 0) {
    return logits.argmax().item<int64_t>();
  }
  if (options.top_k > 0 && options.top_k < kBytes) {
    const auto smallest_kept = std::get<0>(at::topk(logits, options.top_k)).select(0, -1);
    logits.masked_fill_(logits < smallest_kept, -std::numeric_limits<float>::infinity());
  }
  // From the largest on, so that a small temperature cannot overflow.
  logits = (logits - logits.max()) / options.temperature;
  return at::multinomial(at::softmax(logits, 0), 1, /*replacement=*/false, generator).item<int64_t>();
}

}  // namespace

std::string sample_text(Gpt model, std::string_view prompt, SampleOptions options) {
  check(*model, options);
  const at::NoGradGuard no_grad;
  const EvaluationMode evaluation(*model);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(options.seed);
  std::vector<int64_t> tokens;
  for (const char letter : prompt.empty() ? std::string_view("\n") : prompt) {
    tokens.push_back(static_cast<unsigned char>(letter));
  }
  const auto device = model->head_weight().device();
  std::string text;
  for (int64_t i = 0; i < options.count; ++i) {
    const int64_t time = std::min(std::ssize(tokens), model->options.context);
    at::Tensor window =
        at::from_blob(tokens.data() + (std::ssize(tokens) - time), {1, time}, at::TensorOptions(at::kLong)).to(device);
    const at::Tensor last = model->hidden(window).select(1, -1);  // only the last position's logits are needed
    const at::Tensor logits = at::linear(last, model->head_weight()).select(0, 0);
    const int64_t next = choose(logits.to(at::kCPU, at::kFloat), options, generator);
    tokens.push_back(next);
    text.push_back(static_cast<char>(next));
  }
  return text;
}

}  // namespace snug
