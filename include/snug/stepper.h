#pragma once
// Stepper makes one training step in the right order: zero gradients, micro-batches (autocast, forward, weight, scale,
// backward), unscale, check, clip, step, update. A Stepper takes a model, an optimizer and a loss function, and splits
// the batch.
//
//   snug::Stepper stepper(model, optimizer, {.budget = {.memory = snug::Bytes::parse("8GiB")}});
//   auto result = stepper.step({x, y}, [&](const snug::Batch& part) {
//     return snug::Loss::mean(torch::mse_loss(model->forward(part[0]), part[1]), part[1].numel());
//   });
//   if (result.stepped()) std::cout << result.loss() << "\n";

#include <cstdint>
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
#include "snug/state.h"
#include "snug/step_plan.h"
#include "snug/stepper_options.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace snug {

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
      : Stepper(as_module(model), std::vector<torch::optim::Optimizer*>{&optimizer}, options, 0) {}
  /// For several optimizers, none of which holds a parameter of another one. All update together or not at all:
  /// clipping and loss scaling look at the gradients of all, and optimizers that allocate before they write, as snug's
  /// do, allocate before any optimizer writes. Groups, schedules and state stay with each optimizer. State, weights and
  /// gradients stay in memory, also with `offload`; activations may leave. An optimizer over several ranks is a
  /// ConfigError without data_parallel, and beside an optimizer that does not allocate before writing.
  template <class M>
  Stepper(M& model, std::vector<torch::optim::Optimizer*> optimizers, StepperOptions options = {})
      : Stepper(as_module(model), std::move(optimizers), options, 0) {}
  /// For parameters without a module: points of a scene, codes of items, fields. The Stepper trains all parameters that
  /// the optimizer holds, and `parameters` that the optimizer has never held. So a parameter that leaves the
  /// optimizer's groups leaves the Stepper, and memory, in the next step. Messages name a parameter by the parameter's
  /// place in the groups, counted from 0. Weights::Low and data_parallel are ConfigErrors. Replaced parameters:
  /// docs/budget.md.
  Stepper(std::vector<at::Tensor> parameters, torch::optim::Optimizer& optimizer, StepperOptions options = {})
      : Stepper(std::move(parameters), std::vector<torch::optim::Optimizer*>{&optimizer}, std::move(options)) {}
  /// For several optimizers, such as one for each tensor. As for a module; the Stepper trains all parameters that any
  /// of the optimizers holds, and `parameters` that none of the optimizers has ever held.
  Stepper(std::vector<at::Tensor> parameters, std::vector<torch::optim::Optimizer*> optimizers,
          StepperOptions options = {});
  ~Stepper();
  Stepper(Stepper&&) noexcept;

  /// One optimizer step over `batch`: a Batch, or a type of your own (see accumulation.h). Micro-batches are moved to
  /// the model's device, one ahead of the micro-batch in use; the rest of the batch is not moved.
  /// `loss_of(const Batch&)` returns a Loss. With a budget the first step for a shape of batch calls loss_of
  /// several times more, to plan.
  ///
  /// A step that throws drops the gradients. docs/budget.md has a table of the exceptions. In short:
  /// - Parameters, optimizer and scaler are as before the step. Exceptions: writes of loss_of and before_update; an
  ///   optimizer other than snug's that throws, as when memory runs out, because the optimizer allocates while writing;
  ///   a disk that fails while an update streams state in a file; a rank lost in the update (DistributedError: continue
  ///   from a snapshot); the scaler after NonFinite (too many skipped steps).
  /// - Buffers, generators, `carried`, and gradients of leaves that neither the model nor the optimizer holds are as
  ///   before under a budget with planning, and not without. Not as before under any budget: after NonFinite, and after
  ///   a failure of the update itself (another optimizer's exception, a failed disk, a lost rank).
  /// - If another rank fails, this rank throws BudgetExceeded if the other rank ran out of memory, else
  ///   DistributedError.
  ///
  /// loss_of may write parameters, as a layer does that masks its own weight, if loss_of runs once and alone: in one
  /// micro-batch, without a planned budget, data_parallel and Weights::Low. Otherwise such a write is a ConfigError
  /// that names the parameter, because the gradient would be of several models. Instead of masking its own weight, a
  /// layer can compute with weight * mask.
  template <class B = Batch, class F>
  StepResult step(const B& batch, F&& loss_of) {
    return step_over(source_of(batch, loss_of));
  }

  /// For loaders that yield micro-batches: adds one micro-batch, and steps after `accumulate.every` micro-batches.
  /// - An exception drops the window.
  /// - A micro-batch that runs out of memory is repeated, as in step(), only if the micro-batch is the first of its
  ///   window and the Stepper has no other ranks.
  /// - Under a planned budget, a later and larger micro-batch is planned beside the gradients of the earlier
  ///   micro-batches. If no room is left, BudgetExceeded drops the window, and the next windows have a plan for the
  ///   larger micro-batch if such a plan exists.
  template <class B = Batch, class F>
  std::optional<StepResult> accumulate(const B& micro, F&& loss_of) {
    return accumulate_one(source_of(micro, loss_of));
  }

  /// Ends an epoch: treats a window with fewer than `accumulate.every` micro-batches as `accumulate.tail` says. Returns
  /// a result if a step was made.
  std::optional<StepResult> flush();

  /// How the budget was met in the last step, also if operators differed from the plan. After a step that ran out of
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
  /// gradients. With gradients in shards, the statistics are of this rank's gradients. See GradientStatistics.
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
    Batch::Shape shape;
    // Makes items `now` current, and starts to move items `ahead` to the device. An empty `now` only releases all
    // loaded items.
    std::function<void(Range now, std::optional<Range> ahead)> load;
    // Forward on the current items. The last call releases the items.
    std::function<Loss(bool is_last_time)> loss_of;
  };

  Stepper(torch::nn::Module& model, std::vector<torch::optim::Optimizer*> optimizers, const StepperOptions& options,
          int);

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
  if constexpr (requires { batch.to(device); }) {
    return batch.to(device);
  } else {
    return batch;
  }
}

template <class B>
Batch::Shape shape_of(const B& batch) {
  if constexpr (requires { batch.shape(); }) {
    return batch.shape();
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
    const bool is_whole = range.begin == 0 && range.end == static_cast<int64_t>(batch.size());
    return is_whole ? detail::to_device(batch, device())
                    : detail::to_device(batch.slice(range.begin, range.end), device());
  };
  const auto fetch_ahead = [this, &batch, fetch](Range range) {
    if constexpr (std::is_same_v<B, Batch>) {
      return copy_ahead(batch.slice(range.begin, range.end));
    } else {
      return fetch(range);
    }
  };
  return {
      .items = static_cast<int64_t>(batch.size()),
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
