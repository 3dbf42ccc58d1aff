#pragma once
// collect_tensors: the tensors in the result of a forward function. The tensors identify backward passes from the
// result.
//
// CommHook: how a bucket of gradients is summed over the ranks: unchanged, in 16 bits, or by a function of your own.
//
//   snug::DataParallel ddp(model, group, {.hook = snug::bfloat16_hook()});
//   snug::DataParallel own(model, group, {.hook = [](snug::GradientBucket bucket, snug::ProcessGroup& g) {
//     return g.start_all_reduce(bucket.gradients);
//   }});
//
// DataParallel: every rank has the same model and its own share of the batch; backward averages the gradients over the
// ranks, bucket by bucket, while backward still computes the rest.
//
//   auto group = snug::init_process_group();
//   snug::DataParallel ddp(model, group);
//   for (size_t i = 0; i < micro.size(); ++i) {
//     std::optional<snug::NoSync> quiet;
//     if (i + 1 < micro.size()) quiet.emplace(ddp);  // one communication a step, after the last micro-batch
//     ddp.forward([&] { return loss_of(model, micro[i]); }).backward();
//   }
//
// Several forward() before one backward() are fine: sum the losses.
//
// Join: for ranks that run out of data before the other ranks. A rank without data continues to take part in all joint
// operations, and adds nothing to the results.
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
#include <filesystem>
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
#include "snug/training_ranks.h"

namespace snug::detail {

/// Appends the tensors in `value`: a tensor, an object with value() (std::optional, Loss), or ranges and tuples of
/// these. Other values are skipped.
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
class ShardedOptimizer;

/// The parts of a model that ranks keep in shards, in addition to the state of a ShardedOptimizer.
enum class Shard {
  None,       ///< every rank has all weights and the sums of all gradients
  Gradients,  ///< every rank has all weights, and the sums of the gradients that the rank's share of the update needs
  Weights,    ///< every rank has the weights and the sums of the gradients of the rank's share
  Auto,       ///< Gradients; Weights as soon as a rank finds no plan in Stepper::step() otherwise
};

struct GradientBucket {
  size_t index = 0;                         ///< from 0, in the order in which backward completes the buckets
  at::Tensor gradients = {};                ///< the gradients of `parameters`, one after another: 1-D
  std::vector<at::Tensor> parameters = {};  ///< in the same order
};

/// Called when backward has completed a bucket. Starts the communication, and returns a function that ends the
/// communication and leaves the sum over all ranks in `bucket.gradients`. The returned functions are called in the
/// order of the buckets, after the last bucket was started: communication before the calls is hidden behind backward.
/// For the mean, DataParallel divides before the call of the hook. A hook that throws must have sent nothing. If a
/// Stepper then drops the step, the Stepper calls the hook for the same bucket once more, with zeros.
using CommHook = std::function<std::function<void()>(GradientBucket bucket, ProcessGroup& group)>;

/// Half the bytes: gradients are sent, and added, as FP16. Values beyond 65504 become infinite, also in the sum.
CommHook float16_hook();
/// Half the bytes, with FP32's range and 8 bits of precision.
CommHook bfloat16_hook();

struct DataParallelOptions {
  /// Size of a bucket: gradients are collected up to `bucket` and sent together. The first bucket is at most 1 MiB, so
  /// sending starts early.
  Bytes bucket = Bytes(25 << 20);
  /// Gradients lie in the buckets, which saves a copy of all gradients. Gradients must not be detached in place or
  /// resized. With LibTorch 2.15 and later a bucket takes memory from the bucket's first gradient in backward until the
  /// bucket's gradients are dropped, and gradients that were only set to zero are copied. Older versions keep the
  /// memory of the buckets all the time.
  bool gradient_as_bucket_view = true;
  /// Looks in each forward's graph for parameters that took no part on some rank. Off: a parameter that took no part is
  /// an error that names the parameter.
  bool find_unused_parameters = false;
  /// The same parameters are used in the same order in every step. Cannot be used with NoSync.
  bool static_graph = false;
  /// Reduction of the ranks' gradients. Mean is right if every rank's loss is a mean over equally many items. Sum is
  /// right if every rank's loss is the rank's share of the global loss: the sum over the rank's items, divided by the
  /// number of items of all ranks.
  Reduction reduction = Reduction::Mean;
  /// True: before each forward() with gradients, outside NoSync, every rank gets rank 0's running statistics. While the
  /// graph of an earlier forward() waits for its backward pass, the statistics do not change, because the graph may
  /// need the statistics. False: the constructor gives every rank the running statistics of rank 0; after the
  /// constructor, each rank has its own running statistics.
  bool broadcast_buffers = true;
  /// Empty: gradients are sent unchanged.
  CommHook hook = {};
  /// With Gradients, a backward pass that sends leaves each sum on one rank, which keeps the parameter's optimizer
  /// state too. On the other ranks the parameter has no gradient after the pass; inside NoSync each rank has all its
  /// gradients. Sums are added in the order of ranks. `bucket` limits the bytes that are on their way during backward.
  /// Models must be on the CPU. Cannot be used with hook or static_graph.
  ///
  /// With Weights, each parameter, frozen or not, is on one rank too, and comes to the other ranks while an operator
  /// uses the parameter. Until gather_weights(), these conditions hold:
  /// - Operators that use the model run on the thread that sharded the weights, or in backward passes of this thread.
  ///   With Weights the thread is that of the constructor, with Auto also that of the Stepper.
  /// - On the other ranks a request for a pointer to the parameter throws c10::Error.
  /// - Programs write to parameters by operators only, on all ranks alike, and all ranks meet in a barrier() before and
  ///   after the writes.
  ///
  /// Model and weights may be made in files (TensorsInFile), if no rank has room for the whole model; Auto is Weights
  /// then. Algorithm: Rajbhandari et al. 2020, "ZeRO" (arXiv:1910.02054), stages 2 and 3.
  Shard shard = Shard::None;
  /// With shard: the ranks that share the model out among themselves, such as the ranks of one machine. Ranks
  /// 0 to shard_group - 1 are the first such group, and so on; each group has all of the model. Weights and updates are
  /// sent within a group, and sums of gradients go from group to group. Divides the number of ranks; no effect on one
  /// rank. 0: all ranks are one group.
  int64_t shard_group = 0;
  /// With weights in shards, the bytes of other ranks' parameters that are in memory at a time, at most all of them. If
  /// the operands of an operator are larger, they are all in memory while the operator runs. 0: twice the largest
  /// parameter of another rank, and from the first step of a Stepper with a budget on also bytes that the Stepper's
  /// plan leaves unused.
  Bytes window = Bytes(0);
  /// The optimizer that updates the model; needed for shards, and not used otherwise. From here on the optimizer cuts
  /// no parameter of the model.
  ShardedOptimizer* optimizer = nullptr;
};

/// Algorithm: Li et al. 2020 (arXiv 2006.15704). DataParallel uses LibTorch's Reducer, as Python's
/// DistributedDataParallel does.
class DataParallel final : public detail::TrainingRanks {
 public:
  /// Time of the communication of gradients so far, in seconds. NaN if NCCL sends the gradients: NCCL does not report
  /// the time.
  struct CommunicationTime {
    double total = 0;   ///< while any gradients were on their way
    double waited = 0;  ///< when nothing else was left to do: the rest was hidden behind backward
  };

  /// Parameters or buffers, with their names in the module.
  using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

  /// Compares parameters and buffers over all ranks, then gives every rank the values of rank 0. `model` is a module
  /// holder or a pointer to a module. The model's parameters must stay the same tensors from here on, and gradients
  /// must be dense. Throws ConfigError, on every rank and with the same text, if
  /// - a parameter differs in name, shape or dtype, or is frozen on only some ranks (the message names the first of
  ///   these parameters);
  /// - no parameter has gradients;
  /// - a parameter or buffer cannot be sent, because the tensor is sparse or quantized;
  /// - shards are asked for without an optimizer over the same group, or with an optimizer that has a state already,
  ///   lacks a trained parameter, or follows another DataParallel;
  /// - shards are asked for, and the memory layout of a parameter differs.
  template <class M>
  DataParallel(M& model, std::shared_ptr<ProcessGroup> group, DataParallelOptions options = {})
      : DataParallel(named(model->named_parameters()), named(model->named_buffers()), std::move(group),
                     std::move(options)) {}
  DataParallel(const NamedTensors& parameters, const NamedTensors& buffers, std::shared_ptr<ProcessGroup> group,
               DataParallelOptions options = {});
  ~DataParallel() override;
  DataParallel(const DataParallel&) = delete;
  DataParallel& operator=(const DataParallel&) = delete;

  /// Calls `fn()` and returns the result of `fn()`: a loss, outputs, a Loss, or containers of losses and outputs. A
  /// single backward pass that starts at the result sums the gradients; when the pass has returned, the gradients are
  /// the same on all ranks. Parameters may be frozen and unfrozen between a backward pass and the next forward(), the
  /// same parameters on every rank; if the ranks differ, the ranks detect the difference or wait until the timeout.
  ///
  /// If a gradient exists when a backward pass begins, the pass adds to the gradient:
  /// - a gradient that an earlier pass has summed counts once;
  /// - gradients that passes inside NoSync have added on this rank are summed.
  ///
  /// Throws ConfigError if a StepInBackward would take gradients before the gradients are summed. Backward throws
  /// ConfigError if
  /// - backward did not start at the result of a forward(), or is the second backward pass that starts at the result;
  /// - forward() was called inside NoSync and backward outside, or the reverse;
  /// - a parameter got no gradient (the message names the parameter; see find_unused_parameters), or a sparse gradient.
  /// Backward throws DistributedError if a rank is lost.
  template <class F>
  auto forward(F&& fn) {
    const ForwardScope scope(*this);
    auto result = std::forward<F>(fn)();
    std::vector<at::Tensor> outputs;
    detail::collect_tensors(result, outputs);
    prepare_for_backward(outputs);
    return result;
  }

  /// The ranks of this DataParallel.
  ProcessGroup& group() const;

  /// Sets the norm of the gradients of all parameters to at most `max_norm`, on all ranks alike; see clip_grad_norm_.
  /// All ranks must call clip_grad_norm_(). Needed for gradients in shards, of which no rank has all. The bits are
  /// those of snug::clip_grad_norm_ for the same gradients in one process.
  at::Tensor clip_grad_norm_(double max_norm);

  /// Bytes of gradients that this rank has handed to all-reduce, or sent to other ranks, so far.
  int64_t bytes_reduced() const;
  /// Bytes of weights in shards that have come to this rank, or are on their way, so far.
  int64_t weight_bytes_received() const;
  const CommunicationTime& communication() const;

  /// Compares checksums of the parameters over all ranks. All ranks must call check_replicas(). Throws
  /// DistributedError, on every rank, if a parameter is not the same on all ranks; the message names the first
  /// different parameter and a rank whose value differs. Causes are memory errors, or a write that not all ranks made.
  /// With weights in shards, the owners of a parameter in the groups of shards compare; one group has nothing to
  /// compare.
  void check_replicas() const;

  /// Ends weights in shards: all ranks get all weights, and training goes on as with Shard::Gradients. All ranks must
  /// call gather_weights(). No effect without weights in shards. A DataParallel that ends without gather_weights()
  /// leaves each rank the rank's own weights only.
  void gather_weights();

  std::unique_ptr<detail::StepRanks> step_ranks(const std::vector<at::Tensor>& of_model) override;

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

  std::shared_ptr<Impl> impl_;  // hooks in a graph may outlive the DataParallel, and must notice the end
};

/// While NoSync lives, gradients are only accumulated on each rank; the next backward pass outside sends the
/// accumulated gradients with the pass's own gradients. Forward and backward are both inside, or both outside.
class [[nodiscard]] NoSync final {
 public:
  explicit NoSync(DataParallel& parent);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<DataParallel::Impl> impl_;
};

/// With SyncBatchNorm, a rank without data must still run the model, on an empty batch.
class Join final {
 public:
  /// `parameters`: the model's parameters. Parameters without gradients are skipped.
  Join(std::shared_ptr<ProcessGroup> group, std::vector<at::Tensor> parameters);

  /// Every rank must call next() before each step. `items`: this rank's number of items in the step; 0 if the rank has
  /// run out of items or has none in the step. Returns the number of items of all ranks. Sends 8 bytes. Throws
  /// ConfigError, on every rank, if a rank gives less than 0.
  int64_t next(int64_t items);

  /// A loss (scalar, 0) on which all parameters have the gradient 0, whatever their values are.
  at::Tensor nothing() const;

 private:
  std::shared_ptr<ProcessGroup> group_;
  std::vector<at::Tensor> parameters_;
};

}  // namespace snug
