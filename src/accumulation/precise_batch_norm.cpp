#include <exception>
#include <unordered_map>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/var_mean.h>
#include <ATen/record_function.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "snug/extra/batch_norm.h"
#include "src/accumulation/batch_norm_layers.h"

// C++ modules have no forward hooks. LibTorch tells an observer of each operator, with its operands. The operands of
// aten::batch_norm include the input and the running mean; the running mean identifies the layer. So it does not matter
// how often the callable runs the model, or a model its layers.

namespace snug {
namespace {

using detail::BatchNormLayer;

// Mean and squared deviations of all values so far, by channel, in FP64 (Chan, Golub & LeVeque 1979).
struct Statistics {
  int64_t count = 0;
  at::Tensor mean, squares;

  void add(const at::Tensor& input) {
    std::vector<int64_t> dims{0};
    for (int64_t d = 2; d < input.dim(); ++d) {
      dims.push_back(d);
    }
    const auto n = input.numel() / input.size(1);
    const auto of_batch = at::var_mean(input.to(at::kDouble), dims, /*correction=*/0);
    const at::Tensor& batch_mean = std::get<1>(of_batch);
    const at::Tensor batch_squares = std::get<0>(of_batch) * static_cast<double>(n);
    if (count == 0) {
      mean = batch_mean;
      squares = batch_squares;
    } else {
      const auto share = static_cast<double>(n) / static_cast<double>(count + n);
      const at::Tensor delta = batch_mean - mean;
      mean = mean + delta * share;
      squares = squares + batch_squares + delta.square() * (share * static_cast<double>(count));
    }
    count += n;
  }
};

// Sees the batch normalisations of this thread. LibTorch takes plain functions, and swallows what they throw.
struct Observer {
  std::unordered_map<const c10::TensorImpl*, Statistics*> by_running_mean;
  std::exception_ptr error;
  at::CallbackHandle handle;

  static thread_local Observer* current;

  Observer() : handle(at::addThreadLocalCallback(at::RecordFunctionCallback(&see).needsInputs(true))) {
    current = this;
  }
  ~Observer() {
    at::removeCallback(handle);
    current = nullptr;
  }
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  static std::unique_ptr<at::ObserverContext> see(const at::RecordFunction& call) {
    if (current != nullptr && std::string_view(call.name()) == "aten::batch_norm") {
      try {
        const auto operands = call.inputs();  // input, weight, bias, running_mean, ...
        const auto found = current->by_running_mean.find(operands.at(3).toTensor().unsafeGetTensorImpl());
        if (found != current->by_running_mean.end()) {
          found->second->add(operands.at(0).toTensor());
        }
      } catch (...) {
        current->error = std::current_exception();
      }
    }
    return nullptr;
  }
};

thread_local Observer* Observer::current = nullptr;

// The modes of a module's tree, and the state that training changes in its BatchNorms; restored at the end.
class Before {
 public:
  Before(torch::nn::Module& module, const std::vector<BatchNormLayer>& layers) : module_(module) {
    module.apply([&](torch::nn::Module& each) { training_.emplace(&each, each.is_training()); });
    for (const auto& layer : layers) {
      for (const at::Tensor* buffer : {layer.running_mean, layer.running_var, layer.num_batches_tracked}) {
        if (buffer->defined()) {
          buffers_.emplace_back(*buffer, buffer->clone());
        }
      }
    }
  }
  ~Before() {
    const at::NoGradGuard no_grad;
    for (auto& [buffer, value] : buffers_) {
      buffer.copy_(value);
    }
    // train() also sets all modules below, so set the modes from the top down. A module that lies in two places is set
    // in both.
    module_.apply([&](torch::nn::Module& each) { each.train(training_.at(&each)); });
  }
  Before(const Before&) = delete;
  Before& operator=(const Before&) = delete;

 private:
  torch::nn::Module& module_;
  std::unordered_map<const torch::nn::Module*, bool> training_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
};

std::string name_of(torch::nn::Module& module, const torch::nn::Module* layer) {
  std::string name = "the module";
  module.apply([&](const std::string& path, torch::nn::Module& each) {
    if (&each == layer && !path.empty()) {
      name = path;
    }
  });
  return name;
}

}  // namespace

int64_t precise_batch_norm(torch::nn::Module& module, const std::function<void()>& forward) {
  const auto layers = detail::layers_with_statistics(module, "precise_batch_norm");
  const at::NoGradGuard no_grad;
  std::vector<Statistics> statistics(layers.size());
  {
    const Before before(module, layers);
    module.eval();
    Observer observer;
    for (size_t i = 0; i < layers.size(); ++i) {
      layers[i].module->train();
      observer.by_running_mean.emplace(layers[i].running_mean->unsafeGetTensorImpl(), &statistics[i]);
    }
    forward();
    if (observer.error) {
      std::rethrow_exception(observer.error);
    }
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    if (statistics[i].count < 2) {
      throw ConfigError(
          fmt::format("precise_batch_norm: {} values per channel passed {}; the callable must run the whole model, on "
                      "this thread, on more data",
                      statistics[i].count, name_of(module, layers[i].module)));
    }
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    layers[i].running_mean->copy_(statistics[i].mean);
    layers[i].running_var->copy_(statistics[i].squares / static_cast<double>(statistics[i].count - 1));
  }
  return statistics.front().count;
}

}  // namespace snug
