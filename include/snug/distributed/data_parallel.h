#pragma once
// collect_tensors: the tensors in the result of a forward function, by which backward passes from that result are
// recognised.
//
// The way in which a bucket of gradients is summed over the ranks: unchanged, in 16 bits, or by a function of your own.
//
//   snug::DataParallel ddp(model, group, {.hook = snug::bfloat16_hook()});
//   snug::DataParallel own(model, group, {.hook = [](snug::GradientBucket bucket, snug::ProcessGroup& g) {
//     return g.start_all_reduce(bucket.gradients);
//   }});
//
// DataParallel: every rank has the same model and its own share of the batch; backward averages the gradients over the
// ranks, bucket by bucket, while it still computes the rest.
//
//   auto group = snug::init_process_group();
//   snug::DataParallel ddp(model, group);
//   for (size_t i = 0; i < micro.size(); ++i) {
//     std::optional<snug::NoSync> quiet;
//     if (i + 1 < micro.size()) quiet.emplace(ddp);  // one communication a step, after the last micro-batch
//     ddp.forward([&] { return loss_of(model, micro[i]); }).backward();
//   }
//
// Several forward() before one backward() are fine: sum their losses.
//
// Join: for ranks that run out of data before the others. They continue to take part in all joint operations, and add
// nothing to the results.
//
//   snug::Join join(group, model->parameters());
//   snug::DataParallel ddp(model, group, {.reduction = snug::Reduction::Sum});
//   for (;;) {
//     const std::optional<Batch> batch = loader.next();
//     const int64_t items = join.next(batch ? batch->size : 0);          // of all ranks
//     if (items == 0) break;                                             // no rank has any left
//     auto loss = ddp.forward([&] { return batch ? sum_of_losses(model, *batch) / items : join.nothing(); });
//     loss.backward();                                                   // the gradient of the mean over all items
//     optimizer.step();
//   }

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <ranges>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/core.h"
#include "snug/distributed/process_group.h"

namespace snug::detail {

/// Appends the tensors in `value`: a tensor, an object with value() (std::optional, Loss), or ranges and tuples of
/// such. Other values are skipped.
template <class T>
void collect_tensors(const T& value, std::vector<at::Tensor>& tensors) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    if (value.defined()) {
      tensors.push_back(value);
    }
  } else if constexpr (requires { value.has_value(); }) {
    if (value.has_value()) {
      collect_tensors(*value, tensors);
    }
  } else if constexpr (requires { collect_tensors(value.value(), tensors); }) {
    collect_tensors(value.value(), tensors);
  } else if constexpr (std::ranges::range<const T>) {
    if constexpr (!std::is_convertible_v<const T&, std::string>) {
      for (const auto& element : value) {
        collect_tensors(element, tensors);
      }
    }
  } else if constexpr (requires { std::tuple_size<T>::value; }) {
    std::apply([&](const auto&... elements) { (collect_tensors(elements, tensors), ...); }, value);
  }
}

}  // namespace snug::detail

namespace snug {

class ProcessGroup;

struct GradientBucket {
  size_t index = 0;                         ///< from 0, in the order in which backward completes them
  at::Tensor gradients = {};                ///< the gradients of `parameters`, one after another: 1-D
  std::vector<at::Tensor> parameters = {};  ///< in the same order
};

/// Called when backward has completed a bucket. Starts the communication, and returns a function that ends it and
/// leaves the sum over all ranks in `bucket.gradients`. These functions are called in the order of the buckets, after
/// the last bucket was started: communication before that is hidden behind backward. For the mean, DataParallel divides
/// before it calls the hook. A hook that throws must have sent nothing. If a Stepper then drops the step, it calls the
/// hook for the same bucket once more, with zeros.
using CommHook = std::function<std::function<void()>(GradientBucket bucket, ProcessGroup& group)>;

/// Half the bytes: gradients are sent, and added, as FP16. Values beyond 65504, those of the sum included, become
/// infinite.
CommHook float16_hook();
/// Half the bytes, with FP32's range and 8 bits of precision.
CommHook bfloat16_hook();

enum class BufferSync {
  /// Before each forward() with gradients, outside NoSync, every rank gets rank 0's running statistics. While the graph
  /// of an earlier forward() waits for its backward pass, they stay as they are, since it may need them.
  FromRankZero,
  /// After the constructor, which gives every rank those of rank 0, they are each rank's own.
  Never,
};

struct DataParallelOptions {
  /// Size of a bucket: gradients are collected up to this number of bytes and sent together. The first bucket is at
  /// most 1 MiB, so that sending starts early.
  Bytes bucket = Bytes(25 << 20);
  /// Gradients lie in the buckets, which saves a copy of all of them. They must not be detached in place or resized.
  /// With LibTorch 2.15 and later a bucket takes memory from its first gradient in backward until its gradients are
  /// dropped, and gradients that were only set to zero are copied. Older versions hold it all the time.
  bool gradient_as_bucket_view = true;
  /// Looks in each forward's graph for parameters that took no part on some rank. Off: such a parameter is an error
  /// that names it.
  bool find_unused_parameters = false;
  /// The same parameters are used in the same order in every step. Cannot be used with NoSync.
  bool static_graph = false;
  /// Reduction of the ranks' gradients. Mean is right if every rank's loss is a mean over equally many items. Sum is
  /// right if every rank's loss is its share of the global loss: the sum over its items, divided by the number of items
  /// of all ranks.
  Reduction reduction = Reduction::Mean;
  BufferSync buffers = BufferSync::FromRankZero;
  /// Empty: gradients are sent unchanged.
  CommHook hook = {};
};

/// Time of the communication of gradients so far, in seconds. NaN where NCCL sends them: it does not tell.
struct CommunicationTime {
  double total = 0;   ///< while any were on their way
  double waited = 0;  ///< when nothing else was left to do: the rest was hidden behind backward
};

/// Algorithm: Li et al. 2020 (arXiv 2006.15704). It uses LibTorch's Reducer, as Python's DistributedDataParallel does.
class DataParallel final {
 public:
  /// Parameters or buffers under their names in the module.
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

  /// Compares parameters and buffers over all ranks, then gives every rank the values of rank 0. `model` is a module
  /// holder or a pointer to a module. Its parameters must stay the same tensors from here on, and gradients must be
  /// dense. Throws ConfigError, on every rank and with the same words, if a parameter differs in name, shape or dtype
  /// or is frozen on some ranks (the message names the first one), if no parameter has gradients, and if a parameter or
  /// buffer cannot be sent, being sparse or quantized.
  template <class M>
  DataParallel(M& model, std::shared_ptr<ProcessGroup> group, DataParallelOptions options = {})
      : DataParallel(named(model->named_parameters()), named(model->named_buffers()), std::move(group),
                     std::move(options)) {}
  DataParallel(const NamedTensors& parameters, const NamedTensors& buffers, std::shared_ptr<ProcessGroup> group,
               DataParallelOptions options = {});
  ~DataParallel();
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  /// Calls `fn()` and returns its result: a loss, outputs, a Loss, or containers of them. One backward pass that starts
  /// there sums the gradients; when it has returned, they are the same on all ranks. Parameters may be frozen and
  /// unfrozen between a backward pass and the next forward(), the same ones on every rank; if they differ, ranks detect
  /// it or wait until the timeout. A gradient that is there when a backward pass begins is added to: one that an
  /// earlier pass has summed counts once, and what passes inside NoSync have added on this rank is summed.
  ///
  /// Throws ConfigError if a StepInBackward would take gradients before they are summed. Backward throws ConfigError if
  /// - it did not start at what a forward() returned, or is the second that starts there;
  /// - forward() was called inside NoSync and backward outside, or the other way round;
  /// - a parameter got no gradient (the message names it; see find_unused_parameters), or a sparse one.
  /// It throws DistributedError if a rank is lost.
  template <class F>
  auto forward(F&& fn) {
    const ForwardScope scope(*this);
    auto result = std::forward<F>(fn)();
    std::vector<at::Tensor> outputs;
    detail::collect_tensors(result, outputs);
    prepare_for_backward(outputs);
    return result;
  }

  /// The ranks that it was made for.
  ProcessGroup& group() const;

  /// Bytes that this rank has handed to all-reduce for gradients, so far.
  int64_t bytes_reduced() const;
  const CommunicationTime& communication() const;

  /// Compares checksums of the parameters over all ranks. All ranks must call it. Throws DistributedError, on every
  /// rank, if a parameter is not the same on all; the message names the first such parameter and a rank whose value
  /// differs. Causes are memory errors, or a write that not all ranks made.
  void check_replicas() const;

  class Impl;
  Impl& impl() { return *impl_; }  ///< for snug's own use

 private:
  friend class NoSync;

  class [[nodiscard]] ForwardScope final {
   public:
    explicit ForwardScope(DataParallel& parent) : parent_(parent) { parent_.begin_forward(); }
    ~ForwardScope() { parent_.end_forward(); }
    ForwardScope(const ForwardScope&) = delete;
    ForwardScope& operator=(const ForwardScope&) = delete;

   private:
    DataParallel& parent_;
  };

  template <class Dict>
  static NamedTensors named(const Dict& dict) {
    NamedTensors result;
    for (const auto& item : dict) {
      result.emplace_back(item.key(), item.value());
    }
    return result;
  }

  void begin_forward();
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);
  void end_forward();

  std::shared_ptr<Impl> impl_;  // what hangs in a graph may outlive the DataParallel, and must know that it is gone
};

/// While it lives, gradients are only accumulated on each rank; the next backward outside sends them with its own.
/// Forward and backward are both inside, or both outside.
class [[nodiscard]] NoSync final {
 public:
  explicit NoSync(DataParallel& parent);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<DataParallel::Impl> impl_;
};

/// With SyncBatchNorm a rank without data must run the model all the same, on an empty batch.
class Join final {
 public:
  /// `parameters`: the model's. Those without gradients are skipped.
  Join(std::shared_ptr<ProcessGroup> group, std::vector<at::Tensor> parameters);

  /// Every rank must call it before each step. `items`: this rank's number of items in the step; 0 if it has run out or
  /// has none this time. Returns the number of items of all ranks. Sends 8 bytes. Throws ConfigError, on every rank, if
  /// a rank gives less than 0.
  int64_t next(int64_t items);

  /// A loss (scalar, 0) on which all parameters have the gradient 0, whatever their values are.
  at::Tensor nothing() const;

 private:
  std::shared_ptr<ProcessGroup> group_;
  std::vector<at::Tensor> parameters_;
};

}  // namespace snug
