#include "snug/activations/sequential.h"

#include <cmath>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>
#include <torch/nn/modules/container/sequential.h>

#include "snug/activations/checkpoint.h"
#include "snug/activations/detail/segments.h"
#include "snug/core/error.h"
#include "snug/memory/detail/saved_tensor_policy.h"

namespace snug {
namespace {

using Layer = std::function<at::Tensor(at::Tensor)>;
using ModulePointer = std::shared_ptr<torch::nn::Module>;
using Ends = std::vector<size_t>;  // of the segments, each one past its last layer

// --- measured segments

// The storages that a layer saves. Parameters, and views of them, are there anyway.
class Saved {
 public:
  void add(const at::Tensor& tensor) {
    const at::Tensor owner = tensor.is_view() ? at::Tensor(tensor._base()) : tensor;
    if (tensor.has_storage() && !(owner.is_leaf() && owner.requires_grad())) {
      storages_.emplace(tensor.storage().unsafeGetStorageImpl(),
                        std::pair(tensor.storage().getWeakStorageImpl(), tensor.storage().nbytes()));
    }
  }
  void add(const Saved& other) { storages_.insert(other.storages_.begin(), other.storages_.end()); }

  int64_t bytes_without(const Saved& others) const {
    size_t sum = 0;
    for (const auto& [storage, held] : storages_) {
      sum += others.storages_.contains(storage) ? 0 : held.second;
    }
    return static_cast<int64_t>(sum);
  }

 private:
  // A weak pointer keeps an address from being given to another storage.
  std::unordered_map<const c10::StorageImpl*, std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, size_t>> storages_;
};

// Notes what passes on its way to the policy of the region around it.
class Notes final : public detail::SavedTensorPolicy {
 public:
  Notes(std::shared_ptr<SavedTensorPolicy> next, Saved& saved) : next_(std::move(next)), saved_(saved) {}
  std::any pack(const at::Tensor& tensor) override {
    saved_.add(tensor);
    return next_->pack(tensor);
  }
  at::Tensor unpack(std::any& packed) override { return next_->unpack(packed); }

 private:
  std::shared_ptr<SavedTensorPolicy> next_;
  Saved& saved_;  // packing ends with the layer's forward
};

struct Measurement {
  std::vector<Saved> inputs;
  std::vector<Saved> saved;

  Ends least_peak() const {
    const size_t n = inputs.size();
    detail::ChainBytes bytes{std::vector<int64_t>(n), std::vector(n, std::vector<int64_t>(n))};
    for (size_t first = 0; first < n; ++first) {
      bytes.inputs[first] = inputs[first].bytes_without({});
      Saved sum;
      for (size_t end = first; end < n; ++end) {
        sum.add(saved[end]);
        bytes.inside[first][end] = sum.bytes_without(inputs[first]);
      }
    }
    return detail::least_peak_segments(bytes);
  }
};

// Every layer in a region of its own.
at::Tensor run_and_measure(const std::vector<Layer>& layers, at::Tensor input, Measurement& measurement,
                           const ModulePointer& module) {
  for (size_t i = 0; i < layers.size(); ++i) {
    measurement.inputs.emplace_back().add(input);
    const auto saved = std::make_shared<Saved>();
    const auto run = [layer = layers[i], to = std::weak_ptr(saved)](at::Tensor x) {
      std::optional<detail::PolicyScope> scope;
      if (const auto still_measured = to.lock()) {  // not in the recomputation
        scope.emplace(std::make_shared<Notes>(detail::current_policy(), *still_measured));
      }
      return layer(std::move(x));
    };
    input = checkpoint({.label = fmt::format("layer {} of {}", i + 1, layers.size()), .module = module}, run,
                       std::move(input));
    measurement.saved.push_back(std::move(*saved));
  }
  return input;
}

// What was measured, by chain and by kind of input. A chain that takes the address of another gets the other's segments: valid, though
// perhaps not the best.
class KnownSegments {
 public:
  using Key = std::tuple<const void*, size_t, std::vector<int64_t>, c10::ScalarType>;

  std::optional<Ends> find(const Key& key) {
    const std::lock_guard lock(mutex_);
    const auto found = ends_.find(key);
    return found == ends_.end() ? std::nullopt : std::optional(found->second);
  }
  void add(const Key& key, Ends ends) {
    constexpr size_t kMost = 256;
    const std::lock_guard lock(mutex_);
    if (ends_.size() >= kMost) {
      ends_.clear();
    }
    ends_.insert_or_assign(key, std::move(ends));
  }

 private:
  std::mutex mutex_;
  std::map<Key, Ends> ends_;
};

// --- running

Ends equal_segments(size_t layers, size_t segments) {
  Ends ends;
  for (size_t i = 1; i < segments; ++i) {
    ends.push_back(i * (layers / segments));
  }
  ends.push_back(layers);
  return ends;
}

size_t about_root(size_t n) { return static_cast<size_t>(std::lround(std::sqrt(static_cast<double>(n)))); }

at::Tensor run_segments(const std::vector<Layer>& layers, const Ends& ends, at::Tensor input, LastSegment last,
                        const ModulePointer& module) {
  size_t begin = 0;
  for (size_t i = 0; i < ends.size(); ++i) {
    const auto at = [&](size_t layer) { return layers.begin() + static_cast<std::ptrdiff_t>(layer); };
    const auto run = [part = std::vector<Layer>(at(begin), at(ends[i]))](at::Tensor x) {
      for (const Layer& layer : part) {
        x = layer(std::move(x));
      }
      return x;
    };
    if (i + 1 == ends.size() && last == LastSegment::Plain) {
      input = run(std::move(input));
    } else {
      input = checkpoint({.label = fmt::format("segment {} of {}", i + 1, ends.size()), .module = module}, run,
                         std::move(input));
    }
    begin = ends[i];
  }
  return input;
}

at::Tensor run_chain(const void* identity, const std::vector<Layer>& layers, int64_t segments, at::Tensor input,
                     LastSegment last, const ModulePointer& module) {
  const size_t n = layers.size();
  if (n == 0 || segments < 0 || segments > static_cast<int64_t>(n)) {
    throw ConfigError(
        fmt::format("checkpoint_sequential: segments is {}; with {} layers it must be between 1 and {}, "
                    "or 0 for a balance by measured bytes",
                    segments, n, n));
  }
  if (segments > 0) {
    return run_segments(layers, equal_segments(n, static_cast<size_t>(segments)), std::move(input), last, module);
  }
  if (!c10::GradMode::is_enabled()) {
    return run_segments(layers, {n}, std::move(input), last, module);
  }
  if (detail::current_policy() != nullptr) {  // a region around this one must be cut alike when it is recomputed
    return run_segments(layers, equal_segments(n, about_root(n)), std::move(input), last, module);
  }
  static KnownSegments known;
  const KnownSegments::Key key{identity, n, input.sizes().vec(), input.scalar_type()};
  if (const auto ends = known.find(key)) {
    return run_segments(layers, *ends, std::move(input), last, module);
  }
  Measurement measurement;
  at::Tensor output = run_and_measure(layers, std::move(input), measurement, module);
  known.add(key, measurement.least_peak());
  return output;
}

}  // namespace

at::Tensor checkpoint_sequential(const std::vector<Layer>& layers, int64_t segments, at::Tensor input,
                                 LastSegment last) {
  return run_chain(layers.data(), layers, segments, std::move(input), last, /*module=*/nullptr);
}

at::Tensor checkpoint_sequential(torch::nn::Sequential layers, int64_t segments, at::Tensor input, LastSegment last) {
  std::vector<Layer> functions;
  for (torch::nn::AnyModule& module : *layers) {
    functions.emplace_back([module](at::Tensor x) mutable { return module.forward(std::move(x)); });
  }
  return run_chain(layers.get(), functions, segments, std::move(input), last, layers.ptr());
}

}  // namespace snug
