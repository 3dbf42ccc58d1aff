// The order of a training step
//
// A training step is a list of calls whose order is easy to get wrong: a gradient clipped before unscaling, an update
// that one rank leaves out and another makes, an update after half a backward pass. So the order is written down once,
// in Stepper::Impl, for one micro-batch and for many, alone and on ranks, with and without loss scaling, masters and a
// budget. Parts that are off are present and do nothing, so the order is the same with and without them.
//
//   make_step        open the window, plan, run micro-batches, close_and_write
//   close_and_write  close the window, unscale, call before_update, clip, ask accept_update, write, update the loss
//                    scale, finish
//   add_micro_batch  make_step in parts, for loaders that yield micro-batches
//   make_or_repeat   try one of the former, and repeat a try that ran out of memory
//
// A try may fail anywhere. A copy of model and optimizer before each step would take more memory than most budgets
// have, and a step that is left half made would be the caller's problem. The third way is a border in the step:
// begin_writing(). All that may fail comes before the border as far as possible:
//
// - Before the border, a failed try leaves parameters, optimizer and scaler as before. Under a planned budget a journal
//   takes back other changes of the step (note_effects), and the step can be repeated. Without a plan, other changes
//   stay.
// - At the border, ranks agree that no rank has failed (StepRanks::confirm_writing), and the journal ends.
// - After the border, nothing is put back. snug's optimizers allocate all memory before they call the border
//   (UpdateAware::before_writing). An optimizer of unknown needs updates without the limit instead. Updates of weights
//   on the host may come later still (memory/late_writes.h).

#include "snug/stepper.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <limits>
#include <typeinfo>
#include <unordered_set>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "snug/autocast.h"
#include "snug/clip.h"
#include "snug/memory.h"
#include "src/accumulation/copy_ahead.h"
#include "src/core/first_line.h"
#include "src/core/joined_optimizers.h"
#include "src/core/optimizer_capabilities.h"
#include "src/memory/backward_pass.h"
#include "src/memory/limit_paused.h"
#include "src/memory/operator_mode.h"
#include "src/memory/peak_watch.h"
#include "src/precision/lost_updates.h"
#include "src/precision/precision_regions.h"
#include "src/remat/recorded_step.h"
#include "src/remat/slice_scope.h"
#include "src/step/check_options.h"
#include "src/step/step_budget.h"
#include "src/step/step_precision.h"

namespace snug {

class Stepper::Impl {
  friend class Stepper;
  using RankFailure = detail::RankFailure;
  using Repeats = detail::StepBudget::Repeats;

 public:
  // `loose`: the model, if the Stepper owns the model.
  Impl(torch::nn::Module& model, std::vector<torch::optim::Optimizer*> optimizers, const StepperOptions& options,
       std::shared_ptr<detail::LooseParameters> loose = nullptr)
      : options_(options),
        loose_(std::move(loose)),
        model_(model),
        joined_(optimizers.size() == 1 && optimizers.front() != nullptr
                    ? nullptr
                    : std::make_unique<detail::JoinedOptimizers>(optimizers)),
        optimizer_(joined_ ? *joined_ : *optimizers.front()),
        parameters_(model, optimizer_),
        ranks_(options.ranks.data_parallel != nullptr ? options.ranks.data_parallel->step_ranks(model.parameters())
                                                      : std::make_unique<detail::StepRanks>()),
        precision_(options, resolve_together(options.precision), device(), ranks_->agreement(), parameters_.all()),
        window_(parameters_.all()),
        budget_(model, optimizer_, options, *ranks_, parameters_) {
    if (loose_ && options_.ranks.data_parallel != nullptr) {  // whose parameters must stay the same tensors
      throw ConfigError("Stepper: data_parallel needs a module, and was given tensors; register the tensors in one");
    }
    if (loose_ && options_.weights == Weights::Low) {  // masters would take the place of tensors in the groups
      throw ConfigError("Stepper: weights = Low needs a module, and was given tensors; register the tensors in one");
    }
    if (joined_ && joined_->agrees_across_ranks() && (ranks_->is_alone() || !joined_->late().empty())) {
      throw ConfigError(
          "Stepper: one of several optimizers is over several ranks, and could update alone where another one fails; "
          "give data_parallel, and only optimizers that allocate before they write (before_writing), as snug's do");
    }
    const torch::optim::Optimizer* of_shards = ranks_->optimizer_of_shards();
    if (of_shards != nullptr && of_shards != &optimizer_) {
      throw ConfigError(
          "Stepper: the gradients of data_parallel are in shards, which only the optimizer in its options can update; "
          "give that optimizer, and no other");
    }
    if (of_shards != nullptr && (options_.weights == Weights::Low || precision_.regions() != nullptr)) {
      throw ConfigError(
          "Stepper: weights = Low and the guard of a 16-bit precision look at the sums of all gradients, which no rank "
          "has with shards in data_parallel; leave them out (sixteen_bit.guard.patience = 0), or the shards");
    }
    if (options_.weights == Weights::Low) {
      parameters_.make_masters(precision_.precision());
      scaler().name_parameters(parameters_.all());
    } else {
      parameters_.check_full_weights(scaler().is_enabled());
    }
    budget_.check();
    detail::check_planning(model, options, *ranks_, budget_.is_planning());
  }

  c10::Device device() const { return parameters_.device(); }

  StepResult step_over(const MicroBatches& source) {
    require_closed_window();
    if (source.items < 1 && ranks_->is_alone()) {
      throw ConfigError("Stepper.step: the batch is empty");
    }
    return make_or_repeat(Repeats::OnAllRanks, [&] { return make_step(source); });
  }

  std::optional<StepResult> accumulate_one(const MicroBatches& source) {
    if (source.items < 1) {
      if (window_.size() > 0) {
        abandon();
      }
      throw ConfigError("Stepper.accumulate: the micro-batch is empty");
    }
    const bool is_first = window_.size() == 0;
    try {
      return make_or_repeat(is_first ? Repeats::Alone : Repeats::Never, [&] { return add_micro_batch(source); });
    } catch (const BudgetExceeded&) {
      if (!is_first && budget_.is_planning()) {
        plan_for_later_windows(source);
      }
      throw;
    }
  }

  std::optional<StepResult> flush() {
    if (window_.size() == 0 || options_.accumulate.tail == Tail::Carry) {
      return std::nullopt;
    }
    if (options_.accumulate.tail == Tail::Drop) {
      abandon();
      return std::nullopt;
    }
    return make_or_repeat(Repeats::Never, [&] { return close_and_write(); });
  }

  StateDict state_dict() const {
    require_closed_window();  // the window's gradients are not part of the state
    StateDict state;
    precision_.add_to(state);
    if (budget_.is_planning()) {
      state.set("micro_batches", budget_.planner().choices());
      if (ranks_->has_weight_shards()) {
        state.set("weights_in_shards", true);
      }
    }
    if (options_.weights == Weights::Low) {
      StateDict masters;
      for (const auto& [name, master] : parameters_.full_precision()) {
        masters.set(name, master);
      }
      state.set("masters", std::move(masters));
    }
    return state;
  }

  void load_state_dict(const StateDict& state) {
    const Precision saved = detail::check_state(state, options_, precision());
    // Everything that may throw comes before the first write.
    detail::StepPrecision restored = precision_.restored(state, saved, parameters_.all());
    std::optional<detail::StepChoices> choices;
    if (budget_.is_planning() && state.contains("micro_batches")) {
      choices = detail::StepChoices::parse(state.get<std::string>("micro_batches"));
    }
    if (options_.weights == Weights::Low) {
      parameters_.load_masters(state.get<StateDict>("masters"));
    }
    if (choices) {
      budget_.planner().set_choices(*std::move(choices));
      budget_.ask_for_shards(state.contains("weights_in_shards"));
    }
    precision_ = std::move(restored);
    ranks_->catch_up();
    steps_ = 0;
  }

  std::optional<StepPlan> plan_over(const MicroBatches& source) {
    require_closed_window();
    if (!ranks_->is_alone() || source.items < 1) {
      throw ConfigError(
          "Stepper.plan_for: several ranks plan in step() only, where they wait for each other; nor is there a plan "
          "for an empty batch");
    }
    return make_or_repeat(Repeats::Alone, [&] {
      open_window();
      plan_micro_batch(source);
      abandon();
      if (budget_.is_planning()) {
        budget_.planner().save();
      }
      return plan();
    });
  }

  std::optional<StepPlan> plan() const {
    const StepPlan* plan = budget_.last_plan();
    return plan != nullptr ? std::optional(*plan) : std::nullopt;
  }
  Precision precision() const { return precision_.precision(); }
  GradScaler& scaler() { return precision_.scaler(); }

 private:
  struct MicroBatch {
    int64_t items;
    double parts;  // the number of micro-batches of this size that the window is expected to have
    bool is_last;

    bool is_split() const { return parts > 1; }
  };

  // How a try of a step, or of a part of a step, ended.
  struct Attempt {
    RankFailure failure = RankFailure::None;  // None, OutOfMemory or Other
    std::exception_ptr error = {};            // for the caller: BudgetExceeded if a budget was the limit
    Bytes smallest = Bytes(0);                // if out of memory: a sufficient budget; 0: unknown
    bool is_group_lost = false;               // the ranks are no longer in step
  };

  struct Watch {
    explicit Watch(c10::Device device) : level(live_bytes(device).count()), peak(device) {}

    std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
    int64_t level;  // bytes alive before the step
    detail::PeakWatch peak;
  };

  // --- the step, from top to bottom

  StepResult make_step(const MicroBatches& source) {
    open_window();
    const int64_t size = plan_micro_batch(source);
    note_effects();  // before buffers come from rank 0
    start_measuring();
    ranks_->agree_on_passes(model_, source.items == 0 ? 0 : (source.items + size - 1) / size);
    for (int64_t begin = 0; begin < source.items; begin += size) {
      const Range now{begin, std::min(begin + size, source.items)};
      std::optional<Range> ahead;
      if (now.end < source.items) {
        ahead = Range{now.end, std::min(now.end + size, source.items)};
      }
      source.load(now, ahead);
      const double parts = static_cast<double>(source.items) / static_cast<double>(now.end - now.begin);
      run_micro_batch(source, {.items = now.end - now.begin, .parts = parts, .is_last = now.end == source.items});
    }
    return close_and_write();
  }

  StepResult close_and_write() {
    // Until the end, because tensors that the update leaves may exceed the limit.
    std::optional<detail::LimitPaused> unlimited;
    StepResult result = close_window();  // on ranks: gradients, items and losses are now of all ranks
    if (result.items > 0) {
      unscale_and_look(result);
      change_gradients();
      clip(result);
      if (is_accepted(result)) {
        write_parameters(result, unlimited);  // ranks agree first that no rank has failed
        precision_.move_regions(result);
        update_scale();
      } else {
        leave_out_update();
      }
    } else {
      ranks_->confirm_writing();
    }
    finish(result);
    return result;
  }

  std::optional<StepResult> add_micro_batch(const MicroBatches& source) {
    const bool is_first = window_.size() == 0;
    if (is_first) {
      open_window();
    }
    if (budget_.is_planning()) {
      plan_in_window(source);
    }
    note_effects();
    if (is_first) {
      start_measuring();
    }
    source.load({0, source.items}, std::nullopt);
    run_micro_batch(source, {.items = source.items,
                             .parts = static_cast<double>(options_.accumulate.every),
                             .is_last = window_.size() + 1 == options_.accumulate.every});
    return window_.size() < options_.accumulate.every ? std::nullopt : std::optional(close_and_write());
  }

  void plan_in_window(const MicroBatches& source) {
    Runner trial(*this, source, source.items * options_.accumulate.every);
    budget_.plan_here(trial.step(source.items));
  }

  // For a window that was dropped at a micro-batch without room beside the window's gradients. If no plan is found, the
  // caller gets the error of the window, and the next window plans again. Any other error, such as the error of
  // loss_of, is the caller's.
  void plan_for_later_windows(const MicroBatches& source) {
    budget_.begin_step();
    const Attempt planned = attempt([&] { plan_in_window(source); });
    budget_.journal().end();
    source.load({0, 0}, std::nullopt);
    parameters_.drop_gradients();
    if (planned.failure == RankFailure::Other) {
      std::rethrow_exception(planned.error);
    }
  }

  // Runs `part` within the budget. Throws nothing.
  Attempt attempt(const std::function<void()>& part) {
    const Bytes budget = budget_.limit();
    Autocast::clear_cache();  // what passes before have cast is no part of the step
    try {
      if (live_bytes(device()) > budget) {
        budget_.narrow_windows();
      }
      detail::check_budget(budget, device());
      const MemoryLimit limit(device(), budget);
      part();
      return {};
    } catch (const BudgetExceeded& error) {
      return {RankFailure::OutOfMemory, std::current_exception(), error.smallest_feasible()};
    } catch (const DistributedError&) {
      return {.failure = RankFailure::Other, .error = std::current_exception(), .is_group_lost = true};
    } catch (const std::exception& error) {
      if (!is_out_of_memory(error)) {
        return {RankFailure::Other, std::current_exception()};
      }
      const BudgetExceeded exceeded(fmt::format("Stepper.step: the step does not fit into the memory budget {}: {}",
                                                budget.str(), detail::first_line(error)));
      return {RankFailure::OutOfMemory,
              budget.is_unlimited() ? std::current_exception() : std::make_exception_ptr(exceeded)};
    } catch (...) {
      return {RankFailure::Other, std::current_exception()};
    }
  }

  // If `part` runs out of memory, `part` is repeated from its beginning, under a plan that takes less. In any case a
  // part that was not made leaves no gradients, and the other ranks are told.
  template <class Part>
  auto make_or_repeat(Repeats repeats, const Part& part) -> decltype(part()) {
    if (repeats != Repeats::Never) {
      budget_.forget_tries();
    }
    std::optional<detail::OperatorSeam> seam;  // tells a WeightWindow of operators
    if (budget_.model_place().can_leave()) {
      seam.emplace();
    }
    bool has_begun = false;
    const auto end_step = c10::make_scope_exit([&] { keep_effects(); });
    for (;;) {
      if (repeats == Repeats::OnAllRanks && budget_.is_planning()) {
        ranks_->begin_split();
      }
      std::optional<decltype(part())> result;
      const Attempt made = attempt([&] {
        if (!std::exchange(has_begun, true)) {
          budget_.begin_step();
        }
        result.emplace(part());
      });
      if (made.failure == RankFailure::None) {
        return *std::move(result);
      }
      auto give_up = c10::make_scope_exit([&] { budget_.give_up(); });
      const bool takes_less = made.failure == RankFailure::OutOfMemory && budget_.take_less(repeats);
      abandon();
      bool is_repeated = false;  // on all ranks
      std::exception_ptr error = made.error;
      try {
        if (made.is_group_lost && !ranks_->is_dropped()) {
          ranks_->lose_group();
        } else {
          is_repeated = ranks_->fail(takes_less ? RankFailure::TakesLess : made.failure, parameters_.accumulated(),
                                     made.smallest);
        }
      } catch (...) {
        error = std::current_exception();
      }
      effects_.reset();  // not earlier: other ranks may send buffers until all ranks are told
      budget_.go_back();
      if (!is_repeated) {
        std::rethrow_exception(error);
      }
      budget_.count_step_down();
      give_up.release();
    }
  }

  // --- parts of the step

  void require_closed_window() const {
    if (window_.size() > 0) {
      throw ConfigError(fmt::format(
          "Stepper: an accumulation window is open, with {} of {} micro-batches; fill it by accumulate(), or end it by "
          "flush() with tail Exact or Drop",
          window_.size(), options_.accumulate.every));
    }
  }

  // Auto is measured, and all ranks take the precision of rank 0.
  Precision resolve_together(Precision asked) const {
    const Precision own = asked == Precision::Auto ? choose_precision(device()) : asked;
    return static_cast<Precision>(ranks_->from_rank_zero(static_cast<int64_t>(own)));
  }

  [[noreturn]] static void refuse_to_split_whole() {
    throw detail::PlanningMisuse(
        "Stepper.step: a Loss::whole cannot be split, but micro_batch, accumulate, or a plan for another loss asks for "
        "it; use the whole batch at once, or return a Loss::sum or Loss::mean");
  }

  // Items in each micro-batch. With a budget, plans are made here: gradients are the gradients of the whole batch for
  // any split.
  int64_t plan_micro_batch(const MicroBatches& source) {
    const int64_t given = options_.micro_batch == 0 ? source.items : std::min(options_.micro_batch, source.items);
    if (!budget_.is_planning()) {
      return given;
    }
    Runner trial(*this, source, source.items);
    const StepPlan* plan = budget_.plan(trial.step(options_.micro_batch));
    return plan == nullptr || options_.micro_batch > 0 ? given : plan->choice.items;
  }

  void abandon() {
    copy_ahead_.wait();
    window_.abandon();
    parameters_.drop_gradients();
    budget_.model_place().drop_gradients();
    scaler().cancel();
    precision_.forget_gradients();
    lost_updates_.reset();
    watch_.reset();
  }

  // Some parameters may have been frozen, unfrozen or added since the last step. The parameters that this step trains
  // are decided here, for all objects that take part.
  void open_window() {
    if (parameters_.refresh()) {
      scaler().name_parameters(parameters_.all());
    }
    parameters_.drop_gradients();  // of the last step
    budget_.model_place().begin();
    ranks_->open(parameters_.fingerprint());
    window_ = AccumulationWindow(parameters_.all());
    result_ = StepResult();
    window_.begin();
  }

  void start_measuring() {
    watch_.emplace(device());
    ranks_->begin(options_.weights == Weights::Low);
  }

  // From here on, changes of the step outside of itself are noted.
  void note_effects() {
    if (budget_.is_planning()) {
      effects_.emplace(budget_.journal(), [this](const at::Tensor& leaf) { return parameters_.holds(leaf); });
    }
  }

  void run_micro_batch(const MicroBatches& source, const MicroBatch& micro) {
    parameters_.check_unchanged();
    result_.batch_items += micro.items;
    if (effects_) {
      effects_->begin_forward();
    }
    const detail::SliceScope slices(budget_.slices());
    const detail::PrecisionRegionsScope regions(precision_.regions());
    const std::shared_ptr<void> quiet = ranks_->quiet_unless(micro.is_last);
    const at::Tensor weighted = ranks_->forward([&] { return weighted_loss(source, micro); });
    if (effects_) {
      effects_->begin_backward();
    }
    if (weighted.defined()) {
      detail::go_backward(scaler().scale(weighted));
      parameters_.gather_gradients();
      if (options_.gradient_noise && micro.is_split() && window_.size() == 1 && std::isfinite(window_.to_mean())) {
        budget_.model_place().lend_gradients(true);
        result_.first_grad_norm_ = grad_norm(parameters_.updated()) * window_.to_mean();
        budget_.model_place().lend_gradients(false);
        result_.first_batch_items = micro.items;
      }
    }
  }

  // If forward runs once, as in plain training, forward may write parameters, as a layer does that masks its own
  // weight. Exceptions:
  // - on ranks, because a rank may have no data for forward;
  // - with masters, because masters overwrite the model.
  bool may_write_parameters(const MicroBatch& micro) const {
    return window_.size() == 0 && micro.is_last && !budget_.is_planning() && ranks_->is_alone() &&
           options_.weights == Weights::Full;
  }

  at::Tensor weighted_loss(const MicroBatches& source, const MicroBatch& micro) {
    const Loss loss =
        budget_.forward([&] { return precision_.forward([&] { return source.loss_of(/*is_last_time=*/true); }); });
    if (micro.is_split() && loss.kind() == Loss::Kind::Whole) {
      refuse_to_split_whole();
    }
    if (may_write_parameters(micro)) {
      window_.begin();
    }
    if (!ranks_->is_agreed()) {
      window_.divide_by(ranks_->agree_on_items(detail::count_of(loss) * micro.parts));
    }
    return window_.weigh(loss, micro.parts);
  }

  AccumulationWindow::Totals sum_over_ranks() {
    parameters_.check_unchanged();
    if (ranks_->is_alone()) {
      return window_.close();
    }
    if (!ranks_->is_agreed()) {  // without data on this rank
      window_.divide_by(ranks_->agree_on_items(0));
    }
    window_.check_parameters();
    ranks_->send_the_rest(parameters_.accumulated());
    return window_.close(
        [&](double& items, at::Tensor& sums) { ranks_->sum(items, sums, window_.metrics_, result_.batch_items); });
  }

  StepResult close_window() {
    Autocast::clear_cache();  // what the last micro-batch has cast
    budget_.model_place().end();
    auto totals = sum_over_ranks();
    StepResult result = std::exchange(result_, StepResult());
    result.micro_batches = totals.micro_batches;
    result.items = totals.items;
    result.loss_ = totals.mean_loss;
    result.metrics_ = std::move(totals.metrics);
    result.scale_ = precision_.scale();
    if (result.micro_batches == 1) {
      result.first_grad_norm_.reset();
      result.first_batch_items = 0;
    } else if (result.first_grad_norm_.defined()) {
      result.first_grad_norm_ = result.first_grad_norm_ / result.scale_.to(at::kFloat);
    }
    result.activation_peak_bytes = watch_->peak.peak() - watch_->level -
                                   (budget_.model_place().place() != Place::Memory ? 0 : parameters_.gradient_bytes());
    return result;
  }

  void unscale_and_look(StepResult& result) {
    scaler().unscale_(optimizer_);  // ranks agree on skipping the update
    if (sample_gradients_) {
      result.gradient_statistics = gradient_statistics(parameters_.all());
      if (precision_.is_low()) {
        lost_updates_.emplace(parameters_.all(), compute_dtype(precision()));
      }
    }
    precision_.look_at_gradients(parameters_.all());
  }

  void change_gradients() {
    if (!options_.before_update) {
      return;
    }
    const at::NoGradGuard no_grad;
    AccumulationWindow writes(parameters_.all());
    writes.begin();
    options_.before_update(parameters_.updated_by_name());
    writes.check_parameters();
  }

  void clip(StepResult& result) { result.grad_norm_ = ranks_->clip(parameters_.updated(), options_.clip_norm); }

  bool is_accepted(const StepResult& result) {
    return !options_.accept_update || scaler().will_skip(optimizer_) || options_.accept_update(result);
  }

  void leave_out_update() {
    begin_writing();
    precision_.forget_gradients();
    lost_updates_.reset();
    sample_gradients_ = false;
    scaler().cancel();
    parameters_.scatter();
  }

  void begin_writing() {
    ranks_->confirm_writing();
    keep_effects();
  }

  // From here on nothing is put back in this step.
  void keep_effects() {
    effects_.reset();
    budget_.journal().end();
  }

  void write_parameters(StepResult& result, std::optional<detail::LimitPaused>& unlimited) {
    UpdateAware& update = detail::capabilities_of(optimizer_).update;
    // Without data_parallel, an optimizer over several ranks speaks with the other ranks itself.
    const bool agrees_itself = ranks_->is_alone() && update.agrees_across_ranks();
    bool has_begun = false;
    const auto begin = [&] {
      begin_writing();
      has_begun = true;
    };
    const bool begins_late = !agrees_itself && update.before_writing(begin);
    const auto take_back = c10::make_scope_exit([&] {
      if (begins_late) {
        update.before_writing({});
      }
    });
    if (!begins_late) {
      begin();
    }
    // An optimizer that allocates while writing could run out of memory with the update half made.
    if (!begins_late && !budget_.limit().is_unlimited() && !detail::knows_state_to_come(optimizer_)) {
      unlimited.emplace(device(), budget_.limit());
    }
    result.outcome_ = scaler().step(optimizer_);
    if (!has_begun) {  // nothing was written, as where the scaler leaves out an optimizer that does not skip itself
      begin();
    }
    const auto lost_updates = std::exchange(lost_updates_, std::nullopt);
    if (std::exchange(sample_gradients_, false) && lost_updates && result.stepped()) {
      lost_updates->add_to(result.gradient_statistics);
    }
    parameters_.scatter();
  }

  void update_scale() {
    try {
      scaler().update();
    } catch (const NonFinite&) {  // on all ranks, for a step that all ranks have made
      ranks_->written();
      throw;
    }
  }

  void finish(StepResult& result) {
    ranks_->written();
    if (options_.ranks.check_replicas_every > 0 && ++steps_ % options_.ranks.check_replicas_every == 0) {
      ranks_->check_replicas();
    }
    ranks_->end(result);
    result.peak_bytes = watch_->peak.peak();
    result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - watch_->start).count();
    watch_.reset();
    budget_.finish(result);
  }

  // --- planning

  // The micro-batches of a step of `batch` items, as planning runs them.
  class Runner final : public detail::TrialRunner {
   public:
    Runner(Impl& stepper, const MicroBatches& source, int64_t batch)
        : stepper_(stepper), source_(source), batch_(batch) {}

    /// `micro_batch`: items in each micro-batch; 0: to be chosen.
    detail::StepToPlan step(int64_t micro_batch) {
      unload();  // the items that a failed try has left
      is_cut_by_hand_ = micro_batch > 0 && micro_batch < batch_;
      const detail::TrainedParameters& parameters = stepper_.parameters_;
      return {.trial = *this,
              .kind = {.shape = source_.shape,
                       .modes = detail::modes_of(stepper_.model_, stepper_.precision_.regions()),
                       .trained = parameters.fingerprint()},
              .counts = {.batch = batch_,
                         .fixed_bytes = fixed_bytes(),
                         .gradient_bytes = parameters.bytes_of_all_gradients(),
                         .optimizer_bytes = stepper_.budget_.workspace_bytes(),
                         .state_in_file = stepper_.budget_.state_place().bytes(),
                         .model_in_file = stepper_.budget_.model_place().bytes()},
              .micro_batch = micro_batch,
              .state_bytes = state_bytes_,
              .is_within_window = is_within_window()};
    }
    bool is_within_window() const { return stepper_.window_.size() > 0; }
    // Counts as if nothing were in files or on the host. Gradients for masters do not go through buckets.
    int64_t fixed_bytes() const override {
      const detail::StatePlace& state = stepper_.budget_.state_place();
      const detail::ModelPlace& model = stepper_.budget_.model_place();
      const int64_t buckets = stepper_.options_.weights == Weights::Low ? 0 : stepper_.ranks_->bucket_bytes();
      return live_bytes(stepper_.device()).count() - stepper_.budget_.journal().bytes() -
             (is_within_window() ? stepper_.parameters_.gradient_bytes() : 0) + state_bytes_ +
             stepper_.budget_.own_bytes() + buckets + (state.place() != Place::Memory ? state.bytes().saved() : 0) +
             (model.place() != Place::Memory ? model.bytes().saved() - model.spare() : 0) - stepper_.ranks_->spare();
    }
    detail::EffectJournal& journal() override { return stepper_.budget_.journal(); }
    void load(int64_t items, bool to_measure) override {
      source_.load({0, items}, std::nullopt);
      is_part_ = items < batch_ && !to_measure;
    }
    // Also drops gradients that a trial has held.
    void unload() override {
      source_.load({0, 0}, std::nullopt);
      journal().forget_gradients([&](const at::Tensor& leaf) { return stepper_.parameters_.holds(leaf); });
    }
    at::Tensor loss() override {
      stepper_.budget_.model_place().begin();
      const detail::PrecisionRegionsScope regions(stepper_.precision_.regions());
      const Loss loss = stepper_.precision_.forward([&] { return source_.loss_of(/*is_last_time=*/false); });
      is_whole_ = loss.kind() == Loss::Kind::Whole;
      if (is_whole_ && is_cut_by_hand_) {
        refuse_to_split_whole();
      }
      if (is_whole_ && is_part_) {
        throw BudgetExceeded("Stepper: a Loss::whole cannot be split, and its batch does not fit whole");
      }
      for (const at::Tensor& leaf : detail::leaves_of(loss.value())) {
        reached_.insert(stepper_.parameters_.accumulated_for(leaf).unsafeGetTensorImpl());
      }
      check_new_buffers();
      return loss.value();
    }
    void hold_gradients(bool held) override {
      held ? stepper_.parameters_.hold_zero_gradients() : stepper_.parameters_.drop_gradients();
    }
    // With the state outside, as during trials with `offload`, only the bytes of the whole state are known
    // (MovableState::bytes_with_state_in), and no state counts as idle. Then a plan foresees too much, and never too
    // little, for the state in memory.
    int64_t idle_state_bytes() const override {
      const bool is_known = stepper_.ranks_->is_alone() && stepper_.budget_.state_place().place() == Place::Memory;
      const auto is_reached = [this](const at::Tensor& parameter) {
        return parameter.requires_grad() && reached_.contains(parameter.unsafeGetTensorImpl());
      };
      return is_known ? state_bytes_ - detail::state_bytes_to_come(stepper_.optimizer_, is_reached) : 0;
    }
    int64_t put(Placement placement, int64_t spare) override {
      stepper_.budget_.state_place().put(placement.state);
      stepper_.budget_.model_place().put(placement.model, spare);
      return stepper_.budget_.model_place().spare() + stepper_.ranks_->widen_window(spare);
    }
    BytesByKind bytes(Placement placement) const override { return stepper_.budget_.bytes(placement); }
    std::string explain_shards() const override { return stepper_.ranks_->explain_shards(); }
    std::string pinned_by() const override {
      return is_whole_ ? "a Loss::whole" : stepper_.options_.budget.carried.empty() ? "" : "carried state";
    }

    std::string described() const override {
      return detail::describe_stepper(stepper_.model_, stepper_.optimizer_, stepper_.options_, *stepper_.ranks_,
                                      stepper_.precision(), stepper_.budget_.limit());
    }

   private:
    // Each trial would move a buffer on that an earlier call has made and registered.
    void check_new_buffers() {
      for (const auto& buffer : stepper_.model_.named_buffers()) {
        if (!journal().is_registered(buffer.value()) && journal().has_written(buffer.value())) {
          throw detail::PlanningMisuse(fmt::format(
              "Stepper: forward registers the buffer '{}' when it is called first, and writes to it from then on; "
              "planning calls it several times, and training would not go on from where it began. Call it once before",
              buffer.key()));
        }
      }
    }

    Impl& stepper_;
    const MicroBatches& source_;
    int64_t batch_;
    const int64_t state_bytes_ = detail::state_bytes_to_come(stepper_.optimizer_);  // yet to be allocated
    std::unordered_set<const void*> reached_;  // parameters to which a loss has given a gradient
    bool is_cut_by_hand_ = false;
    bool is_part_ = false;   // whether the loaded items are a part of the batch
    bool is_whole_ = false;  // whether the last loss was a Loss::whole
  };

  StepperOptions options_;
  std::shared_ptr<detail::LooseParameters> loose_;
  torch::nn::Module& model_;
  std::unique_ptr<detail::JoinedOptimizers> joined_;  // null: one optimizer
  torch::optim::Optimizer& optimizer_;
  detail::TrainedParameters parameters_;
  std::unique_ptr<detail::StepRanks> ranks_;
  detail::StepPrecision precision_;
  AccumulationWindow window_;
  detail::StepBudget budget_;
  detail::CopyAhead copy_ahead_;
  StepResult result_;  // of the open window; first_grad_norm_ is still scaled
  bool sample_gradients_ = false;
  std::optional<detail::LostUpdates> lost_updates_;  // if sampled: from unscaling to the update
  int64_t steps_ = 0;
  std::optional<Watch> watch_;
  std::optional<detail::EffectJournal::Run> effects_;  // of a planned step, until parameters are written
};

namespace {

// Runs `call`. Errors of snug's types tell the Stepper's name, if the Stepper has a name. Types that a program has
// derived stay what they are.
template <class Call>
auto with_name(const std::string& name, const Call& call) -> decltype(call()) {
  const auto told = [&](const std::exception& error) {
    const std::string_view text = error.what();
    constexpr std::string_view kStepper = "Stepper";
    const bool is_of_stepper = text.starts_with(kStepper);
    return fmt::format("Stepper '{}'{}{}", name, is_of_stepper ? "" : ": ",
                       text.substr(is_of_stepper ? kStepper.size() : 0));
  };
  if (name.empty()) {
    return call();
  }
  try {
    return call();
  } catch (const Error& error) {
    const std::type_info& type = typeid(error);
    if (type == typeid(BudgetExceeded)) {
      throw BudgetExceeded(told(error), static_cast<const BudgetExceeded&>(error).smallest_feasible());
    }
    if (type == typeid(ConfigError) || type == typeid(detail::PlanningMisuse)) {
      throw ConfigError(told(error));
    }
    if (type == typeid(DistributedError)) {
      throw DistributedError(told(error));
    }
    if (type == typeid(NonFinite)) {
      throw NonFinite(told(error));
    }
    throw;
  }
}

}  // namespace

Stepper::Stepper(torch::nn::Module& model, std::vector<torch::optim::Optimizer*> optimizers,
                 const StepperOptions& options, int) {
  with_name(options.name, [&] {
    detail::check(options);
    impl_ = std::make_unique<Impl>(model, std::move(optimizers), detail::lasting(options));
  });
}

Stepper::Stepper(std::vector<at::Tensor> parameters, std::vector<torch::optim::Optimizer*> optimizers,
                 StepperOptions options) {
  with_name(options.name, [&] {
    detail::check(options);
    auto loose = std::make_shared<detail::LooseParameters>(std::move(parameters));
    impl_ = std::make_unique<Impl>(*loose, std::move(optimizers), detail::lasting(options), loose);
  });
}

Stepper::~Stepper() = default;
Stepper::Stepper(Stepper&&) noexcept = default;

StepResult Stepper::step_over(const MicroBatches& source) {
  return with_name(impl_->options_.name, [&] { return impl_->step_over(source); });
}
std::optional<StepResult> Stepper::accumulate_one(const MicroBatches& source) {
  return with_name(impl_->options_.name, [&] { return impl_->accumulate_one(source); });
}
std::optional<StepPlan> Stepper::plan_over(const MicroBatches& source) {
  return with_name(impl_->options_.name, [&] { return impl_->plan_over(source); });
}
std::optional<StepResult> Stepper::flush() {
  return with_name(impl_->options_.name, [&] { return impl_->flush(); });
}
StateDict Stepper::state_dict() const {
  return with_name(impl_->options_.name, [&] { return impl_->state_dict(); });
}
void Stepper::load_state_dict(const StateDict& state) {
  with_name(impl_->options_.name, [&] { impl_->load_state_dict(state); });
}
c10::Device Stepper::device() const { return impl_->device(); }
Batch Stepper::copy_ahead(const Batch& batch) { return impl_->copy_ahead_.start(batch, device()); }
void Stepper::wait_for_copy() { impl_->copy_ahead_.wait(); }
std::optional<StepPlan> Stepper::plan() const { return impl_->plan(); }
Precision Stepper::precision() const { return impl_->precision(); }
const GradScaler& Stepper::scaler() const { return impl_->scaler(); }
void Stepper::sample_gradients() { impl_->sample_gradients_ = true; }
std::map<std::string, at::Tensor> Stepper::full_precision_parameters() const {
  return impl_->parameters_.full_precision();
}

double StepResult::loss() const {
  return loss_.defined() ? loss_.item<double>() : std::numeric_limits<double>::quiet_NaN();
}
double StepResult::metric(const std::string& name) const {
  const auto found = metrics_.find(name);
  if (found == metrics_.end() && items > 0) {
    std::vector<std::string> known;
    for (const auto& [one, value] : metrics_) {
      known.push_back(one);
    }
    throw ConfigError(fmt::format("StepResult.metric: no Loss of the step has a metric '{}'; the metrics are [{}]",
                                  name, fmt::join(known, ", ")));
  }
  return found == metrics_.end() ? std::numeric_limits<double>::quiet_NaN() : found->second.item<double>();
}
bool StepResult::stepped() const { return outcome_; }
double StepResult::grad_norm() const { return grad_norm_.defined() ? grad_norm_.item<double>() : 0.0; }
double StepResult::first_grad_norm() const {
  return first_grad_norm_.defined() ? first_grad_norm_.item<double>() : std::numeric_limits<double>::quiet_NaN();
}
double StepResult::scale() const { return scale_.item<double>(); }

}  // namespace snug
