#pragma once
// Stepper makes one training step in the right order: zero gradients, micro-batches (autocast, forward, weight, scale,
// backward), unscale, check, clip, step, update. A Stepper takes a model, an optimizer and a loss function, and splits
// the batch.
//
//   snug::Stepper stepper(model, optimizer, {.memory_budget = snug::Bytes::parse("8GiB")});
//   auto result = stepper.step({x, y}, [&](const snug::Batch& part) {
//     return snug::Loss::mean(torch::mse_loss(model->forward(part[0]), part[1]), part[1].numel());
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
#include "snug/training_ranks.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace snug {

/// The end of an unfinished accumulation window at flush().
enum class Tail {
  Exact,  ///< step, weighted by the real number of items
  Drop,   ///< forget the window's gradients
  Carry,  ///< leave the window open for the next epoch
};

/// The type of the model's own weights.
enum class Weights {
  Full,  ///< FP32; a 16-bit precision casts the weights for forward (autocast)
  Low,   ///< FP16 or BF16, after model->to(dtype); the Stepper makes FP32 masters for the optimizer to update
};

struct StepperOptions {
  /// Type of forward. Auto is measured when the first Stepper for a device is made, and kept in the Stepper's state.
  Precision precision = Precision::Float32;
  /// Weights::Low:
  /// - Gradients are gathered to FP32 after each micro-batch, then unscaled, clipped and stepped on masters. The
  ///   masters are rounded into the model.
  /// - The Stepper puts the masters into the optimizer in the place of the model's weights. The optimizer must not have
  ///   stepped on 16-bit weights before.
  /// - Every step writes the masters to the model, also a step that skips the update. Change masters, not the model's
  ///   weights.
  /// - When the Stepper ends, or the constructor throws, the optimizer gets the model's weights back and keeps the
  ///   optimizer state, so that another Stepper can continue with the optimizer. A ShardedOptimizer that has stepped is
  ///   the exception.
  /// - A later Stepper starts from the rounded weights, unless the later Stepper loads the state_dict() of this
  /// Stepper.
  Weights weights = Weights::Full;
  /// Items per micro-batch in step(). Smaller micro-batches take less activation memory for the same gradients. 0: the
  /// whole batch at once, or, with a memory_budget, the number of items that is fastest within the budget.
  int64_t micro_batch = 0;
  /// Micro-batches per optimizer step of accumulate(), 1 to 2147483647.
  int64_t accumulate = 1;
  /// How flush() ends an unfinished window: see Tail.
  Tail tail = Tail::Exact;
  /// Most tensor memory on the model's device that may be alive during a step, of every kind: model, optimizer, batch,
  /// gradients, activations. MemoryLimit says how exactly each device enforces the budget.
  ///
  /// Means: the choice of the micro-batch, and activations that are dropped and computed again in backward. Gradients
  /// have the bits of plain training with the chosen micro-batch. Exception: if not even one item fits, a model that
  /// leaves snug::sliced to the plan is cut into slices, and gradients differ by rounding.
  ///
  /// Planning: the first step for a shape of batch makes the choice, plan(), and so does the first step for another set
  /// of modules in training mode, of trained parameters, or of regions in FP32. Planning calls loss_of several times
  /// more. No other thread should allocate tensors during planning.
  ///
  /// Refusal: a budget that cannot be kept is a BudgetExceeded. The refusal itself needs no memory beyond the budget.
  /// smallest_feasible() is 0 if no trial within the budget shows which budget is enough.
  ///
  /// Repetition: a step that still runs out of memory is repeated, at most four times, under a plan that leaves more
  /// memory free or under a new plan. accumulate() has conditions of its own for a repetition.
  ///
  /// Optimizers: the state and the workspace are foreseen for snug's optimizers, torch's Adam, AdamW, RMSprop, SGD and
  /// Adagrad, and implementations of StatefulOptimizer. For any other optimizer the first step shows the state, and the
  /// next step plans again. The update of any other optimizer runs without the limit, because the optimizer might run
  /// out of memory with some parameters updated.
  ///
  /// After each extra call of loss_of, and if a step is repeated or throws, the following are as before:
  /// - memory that existed before and that operators of the forward pass have written, on the thread of the call;
  /// - registered buffers, with memory and sizes;
  /// - gradients that a backward pass has added to, also a backward pass inside loss_of or in a hook; but a step that
  ///   throws drops the gradients of the model and the optimizer;
  /// - torch's default generators, and the tensors in `carried`.
  ///
  /// The extra calls do change other state of the model or of loss_of: members, counters, other generators, values
  /// written through a pointer, and writes of hooks in the backward pass except to buffers. ConfigError if the losses
  /// show such a change, or if the first call of loss_of registers a buffer and later calls write to the buffer.
  ///
  /// Several ranks:
  /// - All ranks take the smallest budget of all ranks, and the smallest micro-batch into which a rank must cut its
  ///   share.
  /// - If a rank runs out of memory, all ranks repeat the step.
  /// - Ranks need not try the same micro-batches. So while a rank is planning, collectives of loss_of over the group of
  ///   data_parallel (SyncBatchNorm, an all_reduce of a metric) are not sent, and the rank's own values stand for the
  ///   values of all ranks.
  /// - loss_of must not send over another group; if loss_of does, set plan = false.
  Bytes memory_budget = Bytes::unlimited();
  /// false: memory_budget is a limit only, and all other options stay as given.
  bool plan = true;
  /// Directory for plans. The next program that makes the same steps tries nothing, and its steps have the same bits.
  /// Empty: plans are forgotten at the end of the program.
  /// - The directory need not exist yet. A relative path counts from the constructor's call.
  /// - Files are found by versions, threads, options, and the names, types and sizes of parameters and buffers.
  /// - If the model's operators have changed although a file was found, the first step under the file's plan says so
  ///   (StepResult::plan_deviation), and the next step plans again.
  /// - A file that cannot be used or written is not an error: StepPlan::considered says why.
  std::filesystem::path plan_folder = {};
  /// Directory on a disk, for activations, optimizer state, weights and gradients outside of memory. A relative path
  /// counts from the constructor's call. The speed of the link is measured once: see measure_offload_link.
  /// - Activations may go to a file if the file takes less time than computing the activations again, or if the
  ///   activations cannot be computed again.
  /// - The state of one of snug's optimizers may go to a file of its own (keep_state_in, with a window of an eighth of
  ///   the state, at most 24 MiB). The state is in the file from the beginning, until a plan brings the state into
  ///   memory.
  /// - Together with the state, weights, buffers of 64 KiB and more, and gradients may go to files, if nothing else
  ///   fits or if the files take less time (StepPlan::model_in_file).
  /// - Weights in files are used like other weights, also between steps. Addresses (data_ptr) change when weights move.
  /// - A gradient in a file is the gradient of the last step until the next step begins. A gradient that the program
  ///   still holds then keeps its values.
  /// - Weights and gradients do not leave memory with data_parallel, with Weights::Low, with an optimizer whose state
  ///   cannot leave, or if a parameter has a hook after its gradient.
  /// - TensorsInFile builds a model that does not fit in memory.
  /// - On devices other than the CPU, give an empty path: activations go to pinned memory of the host, and nothing
  ///   else.
  std::optional<std::filesystem::path> offload = {};
  /// Tensors that loss_of reads and assigns again, such as the detached hidden state that a recurrent network hands to
  /// the next step.
  /// - The Stepper does not own the tensors. The tensors must outlive the Stepper and stay at their addresses.
  /// - ConfigError for a null pointer.
  /// - Any shape is allowed. `plan` does not cut the batch.
  /// - With a smaller micro_batch the state goes from each micro-batch to the next.
  /// - Whenever a planned memory_budget puts buffers back, carried tensors are put back too: the former tensor, and the
  ///   elements under the conditions of memory_budget.
  std::vector<at::Tensor*> carried = {};
  /// Allows `plan` to cut a batch although the model normalises by batch statistics. Statistics are then the
  /// micro-batch's.
  bool split_batch_norm = false;
  /// Largest norm of the gradients of all the optimizer's parameters together; 0: no clipping.
  double clip_norm = 0;
  /// Decides on each update. Gets the step's loss and gradient norm, as in StepResult, and waits for the device.
  /// - false: the update is left out, StepResult::stepped() returns false, and the loss scale stays.
  /// - Not asked if loss scaling already leaves the update out.
  /// - All ranks are asked about the same numbers, and all must give the same answer.
  std::function<bool(double loss, double grad_norm)> accept_update = {};
  /// Loss scaling, used with Precision::Float16 only.
  GradScalerOptions scaler = {};
  /// Moves regions named by PrecisionScope, or the whole step, to FP32 while 16 bits fail. Costs a pass over the
  /// gradients and a wait for the device each step.
  /// - Precision::Auto: on, unless Auto chooses Float32.
  /// - Other precisions: on only if patience is given.
  /// - patience = 0: off.
  PrecisionGuardOptions precision_guard = {};
  /// Measures one more norm a step for GradientNoise: the norm of the first micro-batch, and only of the first for the
  /// reason given at GradientNoise::add. Measured if the batch was split, by hand or by a memory_budget, and the
  /// losses' counts are on the host. ConfigError if nothing can split the batch.
  bool gradient_noise = false;
  /// Runs softmax, normalisations, losses, sums and similar operators in FP32 on a CPU in 16 bits, as on other devices.
  /// See AutocastOptions.
  bool fp32_reductions = false;
  /// The ranks that train together: a DataParallel of the same model, not owned.
  /// - Each rank gives step() a share of the batch, of any size, or an empty batch if the rank has no data left.
  ///   Gradients are the gradients of the mean over the items of all ranks, whatever the `reduction` of DataParallel.
  /// - All ranks freeze and unfreeze the same parameters; otherwise ConfigError on all ranks.
  /// - Only the last micro-batch's backward sends.
  /// - The Stepper calls forward() and NoSync itself, so loss_of calls the model.
  /// - All ranks call the same methods equally often and have the same options.
  /// - If a rank fails in a step, all ranks drop the step. The other ranks throw BudgetExceeded if the failed rank ran
  ///   out of memory, else DistributedError.
  TrainingRanks* data_parallel = nullptr;
  /// Steps between comparisons of the parameters' checksums over all ranks, with data_parallel; 0: never. See
  /// DataParallel::check_replicas.
  int64_t check_replicas_every = 0;
};

class Stepper {
 public:
  /// `model`: a torch module, a module's holder, or a shared_ptr to a module. Model and `optimizer` must outlive the
  /// Stepper.
  /// - Parameters may be frozen and unfrozen between steps. A frozen parameter is neither clipped nor updated, and the
  ///   optimizer's state for the parameter stays.
  /// - The optimizer may hold parameters that the model lacks, or only some of the model's parameters. A parameter that
  ///   the optimizer lacks gets a gradient, still multiplied by the loss scale, and is neither clipped nor updated.
  ///
  /// Throws ConfigError, naming the value, for options that cannot work, models without parameters, or parameters on
  /// several devices.
  template <class M>
  Stepper(M& model, torch::optim::Optimizer& optimizer, StepperOptions options = {})
      : Stepper(as_module(model), optimizer, options, 0) {}
  ~Stepper();
  Stepper(Stepper&&) noexcept;

  /// One optimizer step over `batch`: a Batch, or a type of your own (see accumulation.h). Micro-batches are moved to
  /// the model's device, one ahead of the micro-batch in use; the rest of the batch is not moved.
  /// `loss_of(const Batch&)` returns a Loss. With a memory_budget the first step for a shape of batch calls loss_of
  /// several times more, to plan.
  ///
  /// A step that throws drops the gradients. The other state after the exception, and whether the state is as before:
  ///
  ///   thrown                      by                              parameters, optimizer, scaler  buffers, generators,
  ///                                                                                              carried, gradients of
  ///                                                                                              other leaves
  ///   any exception               loss_of, forward, backward      yes, but writes of loss_of     planned: yes; else no
  ///   BudgetExceeded or           forward, backward               yes                            planned: yes; else no
  ///   c10::OutOfMemoryError       one of snug's optimizers        yes                            planned: yes; else no
  ///                               another optimizer               no: allocates while writing    no
  ///   BudgetExceeded              another rank, out of memory     yes                            planned: yes; else no
  ///   DistributedError            another rank, any other reason  yes                            planned: yes; else no
  ///   DistributedError            a rank lost in the update       no: continue from a snapshot   no
  ///   NonFinite                   too many skipped steps          yes, but the scaler            no
  ///
  /// "planned": under a memory_budget with planning; StepperOptions::memory_budget lists the state that is as before.
  /// Other leaves: leaves that neither the model nor the optimizer holds.
  ///
  /// loss_of may write parameters, as a layer does that masks its own weight, if loss_of runs once and alone: in one
  /// micro-batch, without a planned budget, data_parallel and Weights::Low. Otherwise such a write is a ConfigError
  /// that names the parameter, because the gradient would be of several models. Instead of masking its own weight, a
  /// layer can compute with weight * mask.
  template <class B = Batch, class F>
  StepResult step(const B& batch, F&& loss_of) {
    return step_over(source_of(batch, loss_of));
  }

  /// For loaders that yield micro-batches: adds one micro-batch, and steps after every `accumulate` micro-batches.
  /// - An exception drops the window.
  /// - A micro-batch that runs out of memory is repeated, as in step(), only if the micro-batch is the first of its
  ///   window and the Stepper has no other ranks.
  /// - Under a planned memory_budget, a later and larger micro-batch is planned beside the gradients of the earlier
  ///   micro-batches. If no room is left, BudgetExceeded drops the window, and the next windows have a plan for the
  ///   larger micro-batch if such a plan exists.
  template <class B = Batch, class F>
  std::optional<StepResult> accumulate(const B& micro, F&& loss_of) {
    return accumulate_one(source_of(micro, loss_of));
  }

  /// Ends an epoch: treats a window with fewer than `accumulate` micro-batches as `tail` says. Returns a result if a
  /// step was made.
  std::optional<StepResult> flush();

  /// How memory_budget was met in the last step, also if operators differed from the plan. After a step that ran out of
  /// memory in spite of all repetitions: the plan from before the step. None in these cases:
  /// - the Stepper has no budget, `plan` is false, or no step was made yet;
  /// - no plan was found for the step, so the step threw;
  /// - this rank had no items;
  /// - in accumulate(), a micro-batch larger than the earlier micro-batches ran without a plan, because weights may be
  ///   in files;
  /// - the step was the first step under a plan from plan_folder, and operators differed.
  std::optional<StepPlan> plan() const;
  /// Plans for such a batch now, like the first step(). Throws as step() does, and ConfigError on several ranks,
  /// because ranks plan together in step() only.
  template <class B = Batch, class F>
  std::optional<StepPlan> plan_for(const B& batch, F&& loss_of) {
    return plan_over(source_of(batch, loss_of));
  }

  /// The precision that Auto became, or the given precision.
  Precision precision() const;
  const GradScaler& scaler() const;

  /// Asks the next step for statistics of the gradients, unscaled and before clipping. The cost is one pass over the
  /// gradients. See GradientStatistics.
  void sample_gradients();

  /// With Weights::Low: the FP32 masters under the names of the parameters, for saving the model. Otherwise: the
  /// parameters themselves.
  std::map<std::string, at::Tensor> full_precision_parameters() const;

  /// Precision, scaler, the chosen micro-batches, and masters if any. As in an optimizer's state_dict(), numbers are
  /// the present numbers, and tensors are the masters themselves: later steps change the masters. Throws ConfigError
  /// inside an open accumulation window, because the state does not hold the window's gradients.
  StateDict state_dict() const;
  /// Throws ConfigError for a state of another precision (unless the option is Auto) or of other weights, and
  /// CorruptFile for anything that no Stepper saved. After an exception nothing has changed.
  void load_state_dict(const StateDict& state);

 private:
  struct Range {
    int64_t begin, end;
    bool operator==(const Range&) const = default;
  };
  struct MicroBatches {
    int64_t items;  // in the whole batch
    BatchShape shape;
    // Makes items `now` current, and starts to move items `ahead` to the device. An empty `now` only releases all
    // loaded items.
    std::function<void(Range now, std::optional<Range> ahead)> load;
    // Forward on the current items. The last call releases the items.
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
  // Copies to the device while the device computes. Nobody may read or release the result before wait_for_copy().
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
            const bool is_there = loaded->ahead && loaded->range_ahead == now;  // false when a step is repeated
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
