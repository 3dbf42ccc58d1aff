#pragma once
// StepperOptions: the options of a Stepper, in groups.
//
//   snug::Stepper stepper(model, optimizer, {.micro_batch = 8,
//                                            .clip_norm = 1.0,
//                                            .budget = {.memory = snug::Bytes::parse("8GiB"), .plan_folder = "plans"},
//                                            .accumulate = {.every = 4}});

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/core.h"
#include "snug/grad_scaler.h"
#include "snug/precision.h"
#include "snug/precision_guard.h"

namespace snug {

class StepResult;

namespace detail {
class TrainingRanks;
}

/// The end of an unfinished accumulation window at flush().
enum class Tail {
  Exact,  ///< step, weighted by the real number of items
  Drop,   ///< forget the window's gradients
  Carry,  ///< leave the window open for the next epoch
};

/// The type of the model's own weights. With Low:
/// - Gradients are gathered to FP32 after each micro-batch, then unscaled, clipped and stepped on masters. The
///   masters are rounded into the model.
/// - The Stepper puts the masters into the optimizer in the place of the model's weights. The optimizer must not have
///   stepped on 16-bit weights before.
/// - Every step writes the masters to the model, also a step that skips the update. Change masters, not the model's
///   weights.
/// - When the Stepper ends, or the constructor throws, the optimizer gets the model's weights back and keeps the
///   optimizer state, so that another Stepper can continue with the optimizer. A ShardedOptimizer that has stepped is
///   the exception.
/// - A later Stepper starts from the rounded weights, unless the later Stepper loads the state_dict() of this Stepper.
enum class Weights {
  Full,  ///< FP32; a 16-bit precision casts the weights for forward (autocast)
  Low,   ///< FP16 or BF16, after model->to(dtype); the Stepper makes FP32 masters for the optimizer to update
};

/// How a step keeps within a number of bytes. The whole contract: docs/budget.md.
/// - Means: a smaller micro-batch, and activations that are dropped and computed again in backward; with `offload`,
///   files too. On a CPU gradients have the bits of training without a budget with the chosen micro-batch. Exception:
///   if not even one item fits, a model that leaves snug::sliced to the plan is cut into slices, and gradients differ
///   by rounding.
/// - Planning: the first step for a shape of batch makes the choice, plan(), and so does the first step for another set
///   of modules in training mode, of trained parameters, or of regions in FP32. Planning calls loss_of several times
///   more. No other thread should allocate tensors during planning.
/// - Refusal: a budget that cannot be kept is a BudgetExceeded. The refusal itself needs no memory beyond the budget.
///   smallest_feasible() is 0 if no trial within the budget shows which budget is enough.
/// - Repetition: a step that still runs out of memory is repeated, at most four times, under a plan that leaves more
///   memory free or under a new plan. accumulate() has conditions of its own for a repetition.
/// - Effects: after each extra call of loss_of, and if a step is repeated or throws, most effects of loss_of are put
///   back. Other effects are a ConfigError if the losses show a change. docs/budget.md lists both kinds.
/// - Optimizers other than snug's, torch's usual ones and MemoryAware ones: the second step plans again, and an update
///   runs without the limit unless before_writing() returns true, because the optimizer might run out of memory with
///   some parameters updated. docs/budget.md lists the optimizers.
/// - Several ranks: all take the smallest budget and the smallest micro-batch that a rank needs, and repeat a step
///   together. loss_of must send over the group of data_parallel only, or `plan` must be false. See docs/ranks.md.
struct BudgetOptions {
  /// Most tensor memory on the model's device that may be alive during a step, of every kind: model, optimizer, batch,
  /// gradients, activations. MemoryLimit says how exactly each device enforces the budget.
  Bytes memory = Bytes::unlimited();
  /// false: `memory` is a limit only, and all other options stay as given.
  bool plan = true;
  /// Directory for plans: the next program that makes the same steps tries nothing, and on a CPU its steps have the
  /// same bits. Empty: plans are forgotten at the end of the program.
  std::filesystem::path plan_folder = {};
  /// Directory on a disk, for activations, optimizer state, weights and gradients outside of memory. On devices other
  /// than the CPU, give an empty path: activations go to the host's memory, the optimizer's state too if nothing fits
  /// with the state in memory (with data_parallel, only of a ShardedOptimizer), and weights of 64 KiB and more and all
  /// gradients too if nothing fits with the state on the host (docs/devices.md says how to read weights then; not with
  /// data_parallel). With the state on the host, updates have the bits of the CPU's kernels.
  std::optional<std::filesystem::path> offload = {};
  /// Allows `plan` to cut a batch although the model normalises by batch statistics. Statistics are then the
  /// micro-batch's.
  bool split_batch_norm = false;
  /// Tensors that loss_of reads and assigns again, such as the detached hidden state that a recurrent network hands to
  /// the next step. Not owned: the tensors must outlive the Stepper and stay at their addresses.
  std::vector<at::Tensor*> carried = {};
};

/// How many micro-batches of accumulate() make an optimizer step.
struct AccumulateOptions {
  /// Micro-batches per optimizer step, 1 to 2147483647.
  int64_t every = 1;
  /// How flush() ends an unfinished window: see Tail.
  Tail tail = Tail::Exact;
};

/// The ranks that train together. All ranks call the same methods equally often and have the same options.
/// - Each rank gives step() a share of the batch, of any size, or an empty batch if the rank has no data left.
///   Gradients are the gradients of the mean over the items of all ranks, whatever the `reduction` of DataParallel.
/// - All ranks freeze and unfreeze the same parameters; otherwise ConfigError on all ranks.
/// - Only the last micro-batch's backward sends.
/// - The Stepper calls forward() and NoSync itself, so loss_of calls the model.
/// - If a rank fails in a step, all ranks drop the step. The other ranks throw BudgetExceeded if the failed rank ran
///   out of memory, else DistributedError.
struct RankOptions {
  /// A DataParallel of the same model, not owned.
  detail::TrainingRanks* data_parallel = nullptr;
  /// Steps between comparisons of the parameters' checksums over all ranks, with data_parallel; 0: never. See
  /// DataParallel::check_replicas.
  int64_t check_replicas_every = 0;
};

/// How a step in 16 bits stays accurate.
struct SixteenBitOptions {
  /// Loss scaling, used with Precision::Float16 only.
  GradScalerOptions scaler = {};
  /// Moves regions named by PrecisionScope, or the whole step, to FP32 while 16 bits fail. Costs a pass over the
  /// gradients each step and, once the update is queued, a wait until the device has made the pass.
  /// - Precision::Auto: on, unless Auto chooses Float32.
  /// - Other precisions: on only if patience is given.
  /// - patience = 0: off.
  PrecisionGuardOptions guard = {};
  /// Runs softmax, normalisations, losses, sums and similar operators in FP32 on a CPU in 16 bits, as on other devices.
  /// See AutocastOptions.
  bool fp32_reductions = false;
};

/// The options of a Stepper.
struct StepperOptions {
  /// For a program with several Steppers: messages of BudgetExceeded, ConfigError, DistributedError and NonFinite name
  /// the Stepper, if methods of the Stepper throw exactly such a type. Other exceptions stay unchanged, also those of a
  /// program's own types derived from these.
  std::string name = {};
  /// Type of forward. Auto is measured when the first Stepper for a device is made, and kept in the Stepper's state.
  Precision precision = Precision::Float32;
  /// Type of the model's weights.
  Weights weights = Weights::Full;
  /// Items per micro-batch in step(). Smaller micro-batches take less activation memory for the same gradients. 0: the
  /// whole batch at once, or, with a budget, the number of items that is fastest within the budget.
  int64_t micro_batch = 0;
  /// Largest norm of the gradients of all the optimizer's parameters together; 0: no clipping.
  double clip_norm = 0;
  /// How a step keeps within a number of bytes.
  BudgetOptions budget = {};
  /// How many micro-batches of accumulate() make an optimizer step.
  AccumulateOptions accumulate = {};
  /// The ranks that train together.
  RankOptions ranks = {};
  /// How a step in 16 bits stays accurate.
  SixteenBitOptions sixteen_bit = {};
  /// Reads or changes gradients in place before each update, without autograd: clamps by value, adds noise, takes norms
  /// of layers.
  /// - Gets the parameters that the update writes, under the model's names, with masters in the place of 16-bit
  ///   weights. A parameter that loss_of has not used has no gradient.
  /// - Gradients are those of the whole batch of all ranks, unscaled. Clipping, StepResult::grad_norm() and
  ///   accept_update come afterwards, and use the gradients as the function leaves them.
  /// - Called also if loss scaling leaves the update out; some gradients are then infinite or NaN.
  /// - All ranks must make the same change, so noise needs the same generator state on all ranks.
  /// - Called again if a step is repeated. Changes that the function makes elsewhere, such as counters and statistics,
  ///   then happen again. Temporaries of the function are in no plan. An exception drops the step, as an exception of
  ///   loss_of does.
  /// - ConfigError if the function writes a parameter. The parameter stays written.
  /// - ConfigError with gradient_noise, whose two norms would not be comparable.
  std::function<void(const std::vector<std::pair<std::string, at::Tensor>>& parameters)> before_update = {};
  /// Decides on each update. Gets the step's result so far: loss(), grad_norm() and metric() wait for the device;
  /// stepped(), peak_bytes and times are not known yet.
  /// - false: the update is left out, StepResult::stepped() returns false, and the loss scale stays.
  /// - Not asked if loss scaling already leaves the update out.
  /// - All ranks must give the same answer. loss(), grad_norm(), metric(), items and scale() are the same on all ranks;
  ///   decide on nothing else.
  std::function<bool(const StepResult& result)> accept_update = {};
  /// Measures one more norm a step for GradientNoise: the norm of the first micro-batch, and only of the first for the
  /// reason given at GradientNoise::add. Measured if the batch was split, by hand or by a budget, and the losses'
  /// counts are on the host. ConfigError if nothing can split the batch.
  bool gradient_noise = false;
};

}  // namespace snug
