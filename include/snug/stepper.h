#pragma once
// Stepper: one training step, in the one order that is right: zero gradients, micro-batches (autocast, forward, weight,
// scale, backward), unscale, check, clip, step, update. Give it a model, an optimizer and a loss function; it splits
// the batch.
//
//   snug::Stepper stepper(model, optimizer, {.micro_batch = 8, .clip_norm = 1.0});
//   auto result = stepper.step({x, y}, [&](const snug::Batch& micro) {
//     return snug::Loss::sum(cross_entropy_sum(model->forward(micro[0]), micro[1]), micro[1].numel());
//   });
//   if (result.stepped()) std::cout << result.loss() << "\n";

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/accumulation.h"
#include "snug/core.h"
#include "snug/grad_scaler.h"
#include "snug/precision.h"
#include "snug/precision_guard.h"
#include "snug/state.h"
#include "snug/step_plan.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace snug {

class DataParallel;

/// What becomes of an unfinished accumulation window at flush().
enum class Tail {
  Exact,  ///< step, weighted by the items it really has
  Drop,   ///< forget its gradients
  Carry,  ///< leave it open for the next epoch
};

/// What type the model's own weights have.
enum class Weights {
  Full,  ///< FP32; a 16-bit precision casts them for forward (autocast)
  Low,   ///< FP16 or BF16, after model->to(dtype); the Stepper makes FP32 masters for the optimizer to update
};

struct StepperOptions {
  /// What forward computes in; Auto is measured when the first Stepper for a device is made, and kept in its state.
  Precision precision = Precision::Float32;
  /// Low: gradients are gathered to FP32 after each micro-batch, then unscaled, clipped and stepped on masters, which
  /// are rounded into the model. The Stepper puts the masters into the optimizer in the model's place, so the optimizer
  /// must not have stepped on 16-bit weights before. Every step writes the masters to the model, one that skips its
  /// update too: change masters, not the model's weights. When the Stepper ends, or its constructor throws, the
  /// optimizer gets the model's weights back and keeps its state, so that another Stepper can go on with it (but for a
  /// ShardedOptimizer that has stepped); that one's masters are the rounded weights, unless state_dict() of this one is
  /// loaded into it.
  Weights weights = Weights::Full;
  /// Items per micro-batch in step(); 0: the whole batch at once, or, with a memory_budget, as many as is fastest
  /// within it. Smaller: less activation memory, same gradients.
  int64_t micro_batch = 0;
  /// accumulate(): micro-batches per optimizer step, 1 to 2147483647.
  int64_t accumulate = 1;
  /// flush(): see Tail.
  Tail tail = Tail::Exact;
  /// Most tensor memory on the model's device that may be alive during a step, of whatever kind: model, optimizer,
  /// batch, gradients, activations. It is kept by choosing the micro-batch, and by dropping activations that backward
  /// then computes again; gradients stay those of plain training with that micro-batch, to the bit; where not even one
  /// item fits, a model that leaves its snug::sliced to the plan is cut into slices, and gradients differ by rounding.
  /// What cannot be kept is BudgetExceeded, which is found out within the budget: its smallest_feasible() is 0 where
  /// that does not tell what would do. The choice is made in the first step for a shape of batch, a set of modules in
  /// training mode, of parameters that are trained and of regions in FP32. It calls loss_of some more times while no
  /// other thread should allocate tensors, and is plan(). A step that runs out of memory all the same is made again
  /// under a plan that leaves more free, or that is made anew, at most four times; accumulate() says when it does so.
  /// The optimizer's state and workspace are foreseen for snug's optimizers, torch's Adam, AdamW, RMSprop, SGD and
  /// Adagrad, and what implements StatefulOptimizer. Of others the first step shows the state, and the next one plans
  /// anew; since they might run out of memory with some parameters updated, their update is made without the limit.
  /// After each of these calls, and where a step is made again or throws, these are as they were before:
  /// - memory that was there before and that operators of the forward pass have written, on the thread of the call;
  /// - registered buffers, with their memory and sizes;
  /// - gradients that a backward pass has added to, also one inside loss_of or in a hook; but a step that throws drops
  ///   those of the model and the optimizer;
  /// - torch's default generators, and what `carried` names.
  /// What else the model or loss_of keeps, these calls would move on: members, counters, other generators, what is
  /// written through a pointer, and what hooks write in the backward pass, but to buffers. If the losses tell of it, it
  /// is a ConfigError, as is a buffer that the first call of loss_of registers and later ones write.
  /// Several ranks take the smallest budget of all, and the smallest micro-batch that one of them has to cut its share
  /// into; where one runs out of memory, all make the step again. They need not try the same, so while one tries, what
  /// loss_of sends over the group of data_parallel (SyncBatchNorm, an all_reduce of a metric) is not sent, and its own
  /// values stand for those of all; over another group it must not send: else plan = false. MemoryLimit says how
  /// exactly it is enforced on each device.
  Bytes memory_budget = Bytes::unlimited();
  /// false: memory_budget is a limit only, and everything is as the other options have it.
  bool plan = true;
  /// A directory, which need not be there yet; a relative path is that of the constructor's call. Plans are kept in it,
  /// so that the next program that makes the same steps tries nothing and makes them with the same bits. Files are
  /// found by versions, threads, options, and the names, types and sizes of parameters and buffers. Where the model's
  /// operators have become others all the same, the first step under such a plan says so (StepResult::plan_deviation),
  /// and the next one plans anew. A file that cannot be used, or written, is no error: StepPlan::considered says why.
  /// Empty: plans are forgotten at the program's end.
  std::filesystem::path plan_folder = {};
  /// A directory on a disk; a relative path is that of the constructor's call. Then `plan` may also let activations go
  /// to a file there, where that takes less time than to compute them again, or where they cannot be. The state of one
  /// of snug's optimizers may go there as well, to a file of its own (keep_state_in, with a window of an eighth of the
  /// state, at most 24 MiB): it is there from the beginning and until a plan brings it into memory. With that state the
  /// plan may also let weights, buffers of 64 KiB and more, and gradients go to files, where nothing else fits or where
  /// that takes less time (StepPlan::model_in_file). Weights are used as ever, also between steps, but their addresses
  /// (data_ptr) change when they move. A gradient is that of the last step until the next one begins; one that the
  /// program still holds then stays as it is. Weights and gradients do not leave memory with data_parallel,
  /// Weights::Low, an optimizer whose state cannot leave, or where a parameter has a hook after its gradient.
  /// TensorsInFile builds a model that does not fit. On other devices than the CPU an empty path: activations go to
  /// pinned memory of the host, and nothing else. The speed of the way is measured once. See measure_offload_link.
  std::optional<std::filesystem::path> offload = {};
  /// Tensors that loss_of reads and assigns anew, such as the hidden state that a recurrent network hands to the next
  /// step, detached. Not owned: they must outlive the Stepper and stay where they are. Wherever a planned memory_budget
  /// puts buffers back, these are put back too: the tensor that was there, and its elements as memory_budget says. Any
  /// shape will do; `plan` does not cut the batch then. With a smaller micro_batch the state goes from each micro-batch
  /// to the next. ConfigError for a null pointer.
  std::vector<at::Tensor*> carried = {};
  /// Whether `plan` may cut a batch although the model normalises by its statistics, which are then those of the
  /// micro-batch.
  bool split_batch_norm = false;
  /// Largest norm of the gradients of all the optimizer's parameters together; 0: no clipping.
  double clip_norm = 0;
  /// Asked before each update, with the step's loss and its gradients' norm as StepResult has them. false: the update
  /// is left out, StepResult::stepped() says so, and the loss scale stays. Not asked where loss scaling leaves the
  /// update out itself. Waits for the device. Ranks are asked about the same numbers, and all must answer alike.
  std::function<bool(double loss, double grad_norm)> accept_update = {};
  /// Loss scaling, used with Precision::Float16 only.
  GradScalerOptions scaler = {};
  /// Moves regions named by PrecisionScope, or the whole step, to FP32 while 16 bits do not do. On with
  /// Precision::Auto, unless that chooses Float32; with other precisions only if patience is given. patience = 0: off.
  /// Costs a pass over the gradients and a wait for the device each step.
  PrecisionGuardOptions precision_guard = {};
  /// Measures what GradientNoise needs: one more norm a step, that of the first micro-batch (GradientNoise::add says
  /// why of that one alone), where the batch was split, by hand or by a memory_budget, and the losses' counts are on
  /// the host. ConfigError if nothing can split it.
  bool gradient_noise = false;
  /// On a CPU in 16 bits: softmax, normalisations, losses, sums and the like in FP32, as on other devices. See
  /// AutocastOptions.
  bool fp32_reductions = false;
  /// Not owned; of the same model. Each rank gives step() its own share of the batch, of any size, or an empty batch
  /// where it has no data left; gradients are those of the mean over the items of all ranks, whatever its `reduction`
  /// says. All freeze and unfreeze the same parameters, else ConfigError on all. Only the last micro-batch's backward
  /// sends. The Stepper calls forward() and NoSync itself, so loss_of calls the model. All ranks call the same methods
  /// equally often and have the same options. Where one fails in a step, all drop it: the others throw BudgetExceeded
  /// if it ran out of memory, else DistributedError.
  DataParallel* data_parallel = nullptr;
  /// With data_parallel: steps between comparisons of the parameters' checksums over all ranks; 0: never. See
  /// DataParallel::check_replicas.
  int64_t check_replicas_every = 0;
};

class Stepper {
 public:
  /// `model`: a torch module, its holder, or a shared_ptr to one; it and `optimizer` must outlive the Stepper.
  /// Parameters may be frozen and unfrozen between steps: one that is frozen is then neither clipped nor updated, and
  /// its optimizer's state stays. The optimizer may hold others besides the model's, or only some of them: what it does
  /// not hold gets its gradient, still multiplied by the loss scale, and is neither clipped nor updated.
  /// Throws ConfigError, naming the value, for options that cannot work, models without parameters, or parameters on
  /// several devices.
  template <class M>
  Stepper(M& model, torch::optim::Optimizer& optimizer, StepperOptions options = {})
      : Stepper(as_module(model), optimizer, options, 0) {}
  ~Stepper();
  Stepper(Stepper&&) noexcept;

  /// One optimizer step over `batch`: a Batch, or a type of one's own, see micro_batch.h. Micro-batches are moved to
  /// the model's device, one ahead of the one in use; the rest stays where it is. `loss_of(const Batch&)` returns a
  /// Loss. With a memory_budget the first step for a shape of batch calls it some more times, to plan.
  ///
  /// A step that throws drops the gradients. What else is as before it:
  ///
  ///   thrown                      by                             parameters, optimizer, scaler   buffers, generators,
  ///                                                                                              carried, gradients of
  ///                                                                                              other leaves
  ///   any exception               loss_of, forward, backward     yes, but for writes of loss_of  planned: yes; else no
  ///   BudgetExceeded or           forward, backward              yes                             planned: yes; else no
  ///   c10::OutOfMemoryError       one of snug's optimizers       yes                             planned: yes; else no
  ///                               another optimizer              no: it allocates as it writes   no
  ///   BudgetExceeded              another rank, out of memory    yes                             planned: yes; else no
  ///   DistributedError            another rank, for any reason   yes                             planned: yes; else no
  ///   DistributedError            a rank is lost in the update   no: go on from a snapshot       no
  ///   NonFinite                   too many skipped steps         yes, but for the scaler         no
  ///
  /// "planned": under a memory_budget that is planned for, which lists what is as before. Other leaves are those that
  /// neither the model nor the optimizer holds. loss_of may write parameters, as a layer does that masks its own
  /// weight, if it runs once and alone: in one micro-batch, without a planned budget, data_parallel and Weights::Low.
  /// Else such a write is a ConfigError that names the parameter, since the gradient would be of several models; such a
  /// layer computes with weight * mask there.
  template <class B = Batch, class F>
  StepResult step(const B& batch, F&& loss_of) {
    return step_over(source_of(batch, loss_of));
  }

  /// For loaders that yield micro-batches: adds one, and steps after every `accumulate` of them. What it throws drops
  /// the window. One that runs out of memory is made again, as in step(), only if it is the first of its window and
  /// there are no other ranks. Under a planned memory_budget a later one that is larger than those before it is planned
  /// for beside their gradients. Where it finds no room there, BudgetExceeded drops this window, and the next ones have
  /// a plan for it if there is one.
  template <class B = Batch, class F>
  std::optional<StepResult> accumulate(const B& micro, F&& loss_of) {
    return accumulate_one(source_of(micro, loss_of));
  }

  /// End of an epoch: deals with a window that has fewer than `accumulate` micro-batches as `tail` says. A result if
  /// that made a step.
  std::optional<StepResult> flush();

  /// How memory_budget was met in the last step, also where other operators ran than planned for. After a step that ran
  /// out of memory however often it was made again, it is the plan from before that step. None in these cases:
  /// - there is no budget, `plan` is false, or there was no step yet;
  /// - no plan was found for the step, so that it threw;
  /// - this rank had no items;
  /// - in accumulate(), a micro-batch larger than those before it was run without a plan, as weights may be in files;
  /// - it was the first step under a plan from plan_folder, and operators were others.
  std::optional<StepPlan> plan() const;
  /// Plans for such a batch now, as step() would in its first step. Throws as step() does, and ConfigError on several
  /// ranks, which plan together in step() only.
  template <class B = Batch, class F>
  std::optional<StepPlan> plan_for(const B& batch, F&& loss_of) {
    return plan_over(source_of(batch, loss_of));
  }

  /// The precision that Auto became, or the one that was asked for.
  Precision precision() const;
  const GradScaler& scaler() const;

  /// Asks the next step for statistics of its gradients, unscaled and before clipping: one pass over them. See
  /// GradientStatistics.
  void sample_gradients();

  /// With Weights::Low: the FP32 masters under their parameters' names, for saving the model. Otherwise the parameters
  /// themselves.
  std::map<std::string, at::Tensor> full_precision_parameters() const;

  /// Precision, scaler, the micro-batches that were chosen, and masters where there are any. As in an optimizer's
  /// state_dict(), numbers are those of now and tensors the masters themselves, which later steps change. Throws
  /// ConfigError inside an open accumulation window, whose gradients it does not hold.
  StateDict state_dict() const;
  /// Throws ConfigError for a state of another precision (unless this is Auto) or other weights, CorruptFile for what
  /// no Stepper saved; then nothing has changed.
  void load_state_dict(const StateDict& state);

 private:
  struct Range {
    int64_t begin, end;
    bool operator==(const Range&) const = default;
  };
  struct MicroBatches {
    int64_t items;  // in the batch
    BatchShape shape;
    // Makes items `now` the current ones, and starts to move items `ahead` to the device. None: only lets go of what is
    // there.
    std::function<void(Range now, std::optional<Range> ahead)> load;
    // Forward on the current ones; the last time it lets go of them.
    std::function<Loss(bool is_last_time)> loss_of;
  };

  Stepper(torch::nn::Module& model, torch::optim::Optimizer& optimizer, const StepperOptions& options, int);

  template <class M>
  static torch::nn::Module& as_module(M& model) {
    if constexpr (std::is_convertible_v<M&, torch::nn::Module&>) {
      return model;
    } else {
      return *model;
    }
  }

  template <class B, class F>
  MicroBatches source_of(const B& batch, F& loss_of);
  StepResult step_over(const MicroBatches& source);
  std::optional<StepPlan> plan_over(const MicroBatches& source);
  std::optional<StepResult> accumulate_one(const MicroBatches& source);
  c10::Device device() const;
  // To the device, beside what it computes. Nobody may read the result, or let go of it, before wait_for_copy().
  Batch copy_ahead(const Batch& batch);
  void wait_for_copy();

  class Impl;
  std::unique_ptr<Impl> impl_;
};

namespace detail {

template <class B>
B to_device(const B& batch, c10::Device device) {
  if constexpr (requires { batch_to(batch, device); }) {
    return batch_to(batch, device);
  } else {
    return batch;
  }
}

template <class B>
BatchShape shape_of(const B& batch) {
  if constexpr (requires { batch_shape(batch); }) {
    return batch_shape(batch);
  } else {
    return {};
  }
}

}  // namespace detail

template <class B, class F>
Stepper::MicroBatches Stepper::source_of(const B& batch, F& loss_of) {
  struct Loaded {
    std::optional<B> current, ahead;
    Range range_ahead = {0, 0};
  };
  const auto loaded = std::make_shared<Loaded>();
  const auto fetch = [this, &batch](Range range) {
    const bool is_whole = range.begin == 0 && range.end == batch_size(batch);
    return is_whole ? detail::to_device(batch, device())
                    : detail::to_device(batch_slice(batch, range.begin, range.end), device());
  };
  const auto fetch_ahead = [this, &batch, fetch](Range range) {
    if constexpr (std::is_same_v<B, Batch>) {
      return copy_ahead(batch_slice(batch, range.begin, range.end));
    } else {
      return fetch(range);
    }
  };
  return {
      .items = batch_size(batch),
      .shape = detail::shape_of(batch),
      .load =
          [this, loaded, fetch, fetch_ahead](Range now, std::optional<Range> ahead) {
            loaded->current.reset();
            wait_for_copy();
            if (now.begin == now.end) {
              loaded->ahead.reset();
              return;
            }
            const bool is_there = loaded->ahead && loaded->range_ahead == now;  // not where a step is made again
            loaded->current = is_there ? std::move(loaded->ahead) : fetch(now);
            loaded->ahead.reset();
            if (ahead) {
              loaded->ahead = fetch_ahead(*ahead);
              loaded->range_ahead = *ahead;
            }
          },
      .loss_of =
          [loaded, &loss_of](bool is_last_time) {
            if (!is_last_time) {
              return loss_of(static_cast<const B&>(*loaded->current));
            }
            const B current = *std::exchange(loaded->current, std::nullopt);
            return loss_of(current);
          },
  };
}

}  // namespace snug
