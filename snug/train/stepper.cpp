#include "snug/train/stepper.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "snug/accumulation/window.h"
#include "snug/activations/detail/slice_scope.h"
#include "snug/core/error.h"
#include "snug/core/stateful_optimizer.h"
#include "snug/distributed/sharded_optimizer.h"
#include "snug/distributed/sync_batch_norm.h"
#include "snug/memory/detail/backward_pass.h"
#include "snug/memory/limit.h"
#include "snug/optim/clip.h"
#include "snug/precision/autocast.h"
#include "snug/precision/detail/precision_regions.h"
#include "snug/precision/precision_scope.h"
#include "snug/train/detail/guard_evidence.h"
#include "snug/train/detail/optimizer_bytes.h"
#include "snug/train/detail/ranked_step.h"
#include "snug/train/detail/step_watch.h"
#include "snug/train/detail/step_within_budget.h"
#include "snug/train/detail/stepper_options.h"
#include "snug/train/detail/trained_parameters.h"

namespace snug {

class Stepper::Impl {
  using Repeats = detail::StepWithinBudget::Repeats;

 public:
  Impl(torch::nn::Module& model, torch::optim::Optimizer& optimizer, const StepperOptions& options)
      : options_(options),
        model_(model),
        optimizer_(optimizer),
        parameters_(model, optimizer),
        ranks_(options.data_parallel, model.parameters()),
        precision_(resolve_together(options.precision)),
        scaler_(detail::scaler_options(options.scaler, precision_)),
        guard_(detail::guard_options(options.precision_guard, options.precision)),
        window_(parameters_.all()),
        budget_(model, options, ranks_, parameters_, [this] { abandon(); }) {
    if (options_.weights == Weights::Low) {
      parameters_.make_masters(precision_);
    } else {
      parameters_.check_full_weights(scaler_.is_enabled());
    }
    budget_.check();
    detail::check_planning(model, options, budget_.plans());
    prepare(scaler_);
    regions_.device = device().type();
  }

  c10::Device device() const { return parameters_.device(); }

  // The step, from top to bottom.
  StepResult step_over(const MicroBatches& source) {
    require_closed_window();
    if (source.items < 1 && ranks_.is_alone()) {
      throw ConfigError("Stepper.step: the batch is empty");
    }
    return budget_.run(Repeats::OnAllRanks, [&] {
      open_window();
      const int64_t size = micro_batch_of(source);
      start_measuring();
      if (!ranks_.is_alone() && sends_in_forward()) {
        ranks_.agree_on_passes(source.items == 0 ? 0 : (source.items + size - 1) / size);
      }
      for (int64_t begin = 0; begin < source.items; begin += size) {
        const Range now{begin, std::min(begin + size, source.items)};
        std::optional<Range> ahead;
        if (now.end < source.items) {
          ahead = Range{now.end, std::min(now.end + size, source.items)};
        }
        source.load(now, ahead);
        const double parts = static_cast<double>(source.items) / static_cast<double>(now.end - now.begin);
        run_micro_batch(source, {.items = now.end - now.begin,
                                 .parts = parts,
                                 .is_split = options_.micro_batch > 0 || size < source.items,
                                 .is_last = now.end == source.items});
      }
      return end_window();
    });
  }

  std::optional<StepResult> accumulate_one(const MicroBatches& source) {
    const bool is_first = window_.size() == 0;
    return budget_.run(is_first ? Repeats::Alone : Repeats::Never, [&]() -> std::optional<StepResult> {
      if (is_first) {
        open_window();
      }
      if (budget_.plans()) {
        budget_.plan_here(step_to_plan(source, source.items * options_.accumulate, source.items));
      }
      if (is_first) {
        start_measuring();
      }
      source.load({0, source.items}, std::nullopt);
      run_micro_batch(source, {.items = source.items,
                               .parts = static_cast<double>(options_.accumulate),
                               .is_split = options_.accumulate > 1,
                               .is_last = window_.size() + 1 == options_.accumulate});
      return window_.size() < options_.accumulate ? std::nullopt : std::optional(end_window());
    });
  }

  std::optional<StepResult> flush() {
    if (window_.size() == 0 || options_.tail == Tail::Carry) {
      return std::nullopt;
    }
    if (options_.tail == Tail::Drop) {
      abandon();
      return std::nullopt;
    }
    return budget_.guarded([&] { return end_window(); });
  }

  StateDict state_dict() const {
    require_closed_window();  // its gradients are no part of the state
    StateDict state;
    state.set("precision", std::string(to_string(precision_)));
    state.set("scaler", scaler_.state_dict());
    if (budget_.plans()) {
      state.set("micro_batches", budget_.planner().choices());
    }
    if (guard_.is_on()) {
      state.set("precision_guard", detail::state_of(guard_));
    }
    if (options_.weights == Weights::Low) {
      state.set("masters", parameters_.masters_state());
    }
    return state;
  }

  std::map<std::string, at::Tensor> full_precision_parameters() const { return parameters_.full_precision(); }

  void load_state_dict(const StateDict& state) {
    const Precision saved = detail::check_state(state, options_, precision_);
    // All that may throw comes before the first write.
    GradScaler scaler(detail::scaler_options(options_.scaler, saved));
    scaler.load_state_dict(state.get<StateDict>("scaler"));
    prepare(scaler);
    PrecisionGuard guard = guard_;
    if (guard.is_on() && state.contains("precision_guard")) {
      guard.restore(detail::regions_from(state.get<StateDict>("precision_guard")));
    }
    auto in_full = guard.full_regions();
    const bool has_choices = budget_.plans() && state.contains("micro_batches");
    auto choices = has_choices ? detail::StepPlanner::parse_choices(state.get<std::string>("micro_batches"))
                               : std::vector<detail::StepPlanner::Choice>();
    if (options_.weights == Weights::Low) {
      parameters_.load_masters(state.get<StateDict>("masters"));
    }
    if (has_choices) {
      budget_.planner().set_choices(std::move(choices));
    }
    precision_ = saved;
    scaler_ = std::move(scaler);
    guard_ = std::move(guard);
    regions_.in_full = std::move(in_full);
    ranks_.catch_up();
    steps_ = 0;
  }

  std::optional<StepPlan> plan_for(const MicroBatches& source) {
    require_closed_window();
    if (!ranks_.is_alone() || source.items < 1) {
      throw ConfigError(
          "Stepper.plan: several ranks plan in step() only, where they wait for each other; nor is there a plan for an "
          "empty batch");
    }
    budget_.run(Repeats::Alone, [&] {
      open_window();
      micro_batch_of(source);
      abandon();
      return 0;
    });
    return plan();
  }

  std::optional<StepPlan> plan() const {
    const StepPlan* plan = budget_.last_plan();
    return plan != nullptr ? std::optional(*plan) : std::nullopt;
  }
  void sample_gradients() { sample_gradients_ = true; }
  Precision precision() const { return precision_; }
  const GradScaler& scaler() const { return scaler_; }

 private:
  void require_closed_window() const {
    if (window_.size() > 0) {
      throw ConfigError(fmt::format(
          "Stepper: an accumulation window is open, with {} of {} micro-batches; fill it by accumulate(), or end it by "
          "flush() with tail Exact or Drop",
          window_.size(), options_.accumulate));
    }
  }

  using Evidence = decltype(detail::gradient_evidence({}, {}));
  struct MicroBatch {
    int64_t items;
    double parts;  // how many of its size the window is expected to have
    bool is_split;
    bool is_last;
  };

  Precision resolve_together(Precision asked) const {
    return static_cast<Precision>(ranks_.from_rank_zero(static_cast<int64_t>(detail::resolve(asked, device()))));
  }

  void prepare(GradScaler& scaler) {
    scaler.name_parameters(parameters_.all());
    scaler.agree_by(ranks_.agreement());
    make_scale(scaler);
  }

  // The scaler makes its tensors when it first scales; a step that is measured must not pay for them.
  at::Tensor make_scale(GradScaler& scaler) const {
    return scaler.scale(at::ones({}, at::TensorOptions().device(device())));
  }

  bool sends_in_forward() {
    const auto norms = detail::sync_batch_norms(model_);
    return std::any_of(norms.begin(), norms.end(), [this](const SyncBatchNormImpl* norm) {
      return norm->is_training() && &norm->group() == &ranks_.parallel().group();
    });
  }

  // Items in each micro-batch. With a budget this is where plans are made: gradients are those of the whole batch for any split.
  int64_t micro_batch_of(const MicroBatches& source) {
    const int64_t given = options_.micro_batch == 0 ? source.items : std::min(options_.micro_batch, source.items);
    if (!budget_.plans()) {
      return given;
    }
    const StepPlan* plan = budget_.plan(step_to_plan(source, source.items, options_.micro_batch));
    return plan == nullptr || options_.micro_batch > 0 ? given : plan->choice.items;
  }

  detail::StepToPlan step_to_plan(const MicroBatches& source, int64_t batch, int64_t micro_batch) {
    const auto is_whole = std::make_shared<bool>(false);
    const auto unload = [&source] { source.load({0, 0}, std::nullopt); };
    unload();  // what a failed try has left
    const int64_t live = live_bytes(device()).count() - (window_.size() > 0 ? parameters_.gradient_bytes() : 0);
    return {.kind = {.shape = source.shape, .is_training = model_.is_training(), .trained = parameters_.fingerprint()},
            .batch = batch,
            .micro_batch = micro_batch,
            .fixed_bytes = live + detail::state_bytes_to_come(optimizer_) + budget_.own_bytes(),
            .gradient_bytes = parameters_.bytes_of_all_gradients(),
            .optimizer_bytes = detail::workspace_bytes(optimizer_),
            .is_within_window = window_.size() > 0,
            .forward =
                [this, &source, is_whole, batch](int64_t items) {
                  source.load({0, items}, std::nullopt);
                  return [this, &source, is_whole, is_part = items < batch] {
                    const detail::PrecisionRegionsScope regions(guard_.is_on() ? &regions_ : nullptr);
                    const Loss loss = forward([&] { return source.loss_of(/*is_last_time=*/false); });
                    *is_whole = loss.kind() == Loss::Kind::Whole;
                    if (*is_whole && is_part) {
                      throw BudgetExceeded("Stepper: a Loss::whole cannot be split, and its batch does not fit whole");
                    }
                    return loss.value();
                  };
                },
            .unload = unload,
            .hold_gradients = [this](bool held) { parameters_.hold_zero_gradients(held); },
            .pinned_by = [is_whole] { return std::string(*is_whole ? "a Loss::whole" : ""); }};
  }

  void abandon() {
    window_.abandon();
    parameters_.drop_gradients();
    scaler_.cancel();
    watch_.reset();
  }

  // Some parameters may have been frozen, unfrozen or added since the last step: whom this one trains is decided here, for all who take part.
  void open_window() {
    if (parameters_.refresh()) {
      scaler_.name_parameters(parameters_.all());
    }
    parameters_.drop_gradients();  // the last step's
    ranks_.open(parameters_.fingerprint());
    window_ = AccumulationWindow(parameters_.all());
    first_grad_norm_.reset();
    batch_items_ = 0;
    window_.begin();
  }

  void start_measuring() {
    watch_.emplace(device());
    ranks_.begin(options_.weights == Weights::Low);
  }

  void run_micro_batch(const MicroBatches& source, const MicroBatch& micro) {
    parameters_.check_unchanged();
    batch_items_ += micro.items;
    const detail::SliceScope slices(budget_.slices());
    const detail::PrecisionRegionsScope regions(guard_.is_on() ? &regions_ : nullptr);
    std::optional<NoSync> quiet;
    if (ranks_.is_quiet(micro.is_last)) {
      quiet.emplace(ranks_.parallel());
    }
    const at::Tensor weighted = ranks_.forward([&] { return weighted_loss(source, micro); });
    if (weighted.defined()) {
      detail::go_backward(scaler_.scale(weighted));
      parameters_.gather_gradients();
      if (options_.gradient_noise && micro.is_split && window_.size() == 1 && std::isfinite(window_.to_mean())) {
        first_grad_norm_ = grad_norm(parameters_.updated()) * window_.to_mean();
        first_batch_items_ = micro.items;
      }
    }
  }

  template <class F>
  Loss forward(F&& loss_of) {
    std::optional<Autocast> autocast;
    std::optional<PrecisionScope> whole_step_in_fp32;
    if (precision_ != Precision::Float32) {
      autocast.emplace(device().type(), compute_dtype(precision_),
                       AutocastOptions{.fp32_reductions = options_.fp32_reductions});
    }
    if (guard_.is_full("")) {
      whole_step_in_fp32.emplace("");
    }
    return loss_of();
  }

  at::Tensor weighted_loss(const MicroBatches& source, const MicroBatch& micro) {
    const Loss loss = budget_.forward([&] { return forward([&] { return source.loss_of(/*is_last_time=*/true); }); });
    if (micro.is_split && loss.kind() == Loss::Kind::Whole) {
      throw ConfigError(
          "Stepper.step: a Loss::whole cannot be split, but micro_batch or accumulate asks for it; use the whole "
          "batch at once");
    }
    if (!ranks_.is_alone() && !ranks_.is_agreed()) {
      window_.divide_by(ranks_.agree_on_items(static_cast<double>(loss.count()) * micro.parts));
    }
    return window_.weigh(loss, micro.parts);
  }

  AccumulationWindow::Totals close_window() {
    parameters_.check_unchanged();
    if (ranks_.is_alone()) {
      return window_.close();
    }
    if (!ranks_.is_agreed()) {  // no data here
      window_.divide_by(ranks_.agree_on_items(0));
    }
    window_.check_parameters();
    ranks_.send_the_rest(parameters_.accumulated());
    return window_.close([&](int64_t& items, at::Tensor& loss_sum) { ranks_.sum(items, loss_sum, batch_items_); });
  }

  void update(StepResult& result) {
    std::optional<LostUpdates> lost_updates;
    std::optional<Evidence> evidence;
    scaler_.unscale_(optimizer_);  // confirms, where the ranks agree on it
    if (sample_gradients_) {
      result.gradient_statistics = gradient_statistics(parameters_.all());
      if (precision_ != Precision::Float32) {
        lost_updates.emplace(parameters_.all(), compute_dtype(precision_));
      }
    }
    if (guard_.is_on() && precision_ != Precision::Float32) {
      evidence = detail::gradient_evidence(parameters_.all(), regions_.entered);
    }
    const auto updated = parameters_.updated();
    result.grad_norm_ = options_.clip_norm > 0 ? clip_grad_norm_(updated, options_.clip_norm) : grad_norm(updated);
    result.outcome_ = write_parameters();
    if (evidence) {
      result.precision_changes = guard_.observe(*evidence);
      regions_.in_full = guard_.full_regions();
    }
    sample_gradients_ = false;
    if (lost_updates && result.stepped()) {
      lost_updates->add_to(result.gradient_statistics);
    }
    parameters_.scatter();
    try {
      scaler_.update();
    } catch (const NonFinite&) {  // on all ranks, of a step that all have made
      ranks_.written();
      throw;
    }
  }

  // Until then a step that failed leaves all as it was, and may be made again.
  StepOutcome write_parameters() {
    const auto begin = [this] {
      ranks_.confirm_writing();
      budget_.begin_writing();
    };
    auto* stateful = dynamic_cast<StatefulOptimizer*>(&optimizer_);
    // Without data_parallel it is for a ShardedOptimizer to speak with the others.
    const bool agrees_itself = ranks_.is_alone() && dynamic_cast<ShardedOptimizer*>(&optimizer_) != nullptr;
    if (stateful == nullptr || agrees_itself || !stateful->before_writing(begin)) {
      begin();
      return scaler_.step(optimizer_);
    }
    const auto take_back = c10::make_scope_exit([&] { stateful->before_writing({}); });
    return scaler_.step(optimizer_);
  }

  StepResult end_window() {
    StepResult result;
    const auto totals = close_window();
    result.micro_batches = totals.micro_batches;
    result.items = totals.items;
    result.loss_ = totals.mean_loss;
    result.scale_ = make_scale(scaler_);
    result.batch_items = std::exchange(batch_items_, 0);
    if (result.micro_batches > 1 && first_grad_norm_.defined()) {
      result.first_grad_norm_ = first_grad_norm_ / result.scale_.to(at::kFloat);
      result.first_batch_items = first_batch_items_;
    }
    first_grad_norm_.reset();
    result.activation_peak_bytes = watch_->rise() - parameters_.gradient_bytes();
    if (totals.items > 0) {
      update(result);
    } else {
      ranks_.confirm_writing();
    }
    ranks_.written();
    if (options_.check_replicas_every > 0 && ++steps_ % options_.check_replicas_every == 0) {
      options_.data_parallel->check_replicas();
    }
    result.bytes_sent = ranks_.bytes_sent();
    result.communication_seconds = ranks_.communication().total;
    result.communication_waited = ranks_.communication().waited;
    ranks_.end();
    watch_->finish(result);
    watch_.reset();
    budget_.finish(result);
    return result;
  }

  StepperOptions options_;
  torch::nn::Module& model_;
  torch::optim::Optimizer& optimizer_;
  detail::TrainedParameters parameters_;
  detail::RankedStep ranks_;
  Precision precision_;
  GradScaler scaler_;
  PrecisionGuard guard_;
  detail::PrecisionRegions regions_;
  AccumulationWindow window_;
  detail::StepWithinBudget budget_;
  at::Tensor first_grad_norm_;  // of the first micro-batch's mean, still scaled
  bool sample_gradients_ = false;
  int64_t first_batch_items_ = 0;
  int64_t batch_items_ = 0;
  int64_t steps_ = 0;
  std::optional<detail::StepWatch> watch_;
};

Stepper::Stepper(torch::nn::Module& model, torch::optim::Optimizer& optimizer, const StepperOptions& options, int) {
  detail::check(options);
  impl_ = std::make_unique<Impl>(model, optimizer, options);
}

Stepper::~Stepper() = default;
Stepper::Stepper(Stepper&&) noexcept = default;

StepResult Stepper::step_over(const MicroBatches& source) { return impl_->step_over(source); }
std::optional<StepResult> Stepper::accumulate_one(const MicroBatches& source) {
  if (source.items < 1) {
    throw ConfigError("Stepper.accumulate: the micro-batch is empty");
  }
  return impl_->accumulate_one(source);
}

std::optional<StepResult> Stepper::flush() { return impl_->flush(); }
c10::Device Stepper::device() const { return impl_->device(); }
std::optional<StepPlan> Stepper::plan_for(const MicroBatches& source) { return impl_->plan_for(source); }
std::optional<StepPlan> Stepper::plan() const { return impl_->plan(); }
Precision Stepper::precision() const { return impl_->precision(); }
void Stepper::sample_gradients() { impl_->sample_gradients(); }
std::map<std::string, at::Tensor> Stepper::full_precision_parameters() const {
  return impl_->full_precision_parameters();
}
const GradScaler& Stepper::scaler() const { return impl_->scaler(); }
StateDict Stepper::state_dict() const { return impl_->state_dict(); }
void Stepper::load_state_dict(const StateDict& state) { impl_->load_state_dict(state); }

}  // namespace snug
