#include "snug/train/stepper.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "snug/accumulation/window.h"
#include "snug/core/error.h"
#include "snug/memory/detail/peak_watch.h"
#include "snug/memory/limit.h"
#include "snug/optim/clip.h"
#include "snug/precision/autocast.h"
#include "snug/precision/detail/precision_regions.h"
#include "snug/precision/precision_scope.h"
#include "snug/train/detail/guard_evidence.h"
#include "snug/train/detail/ranked_step.h"
#include "snug/train/detail/stepper_options.h"
#include "snug/train/detail/trained_parameters.h"

namespace snug {

double StepResult::loss() const {
  return loss_.defined() ? loss_.item<double>() : std::numeric_limits<double>::quiet_NaN();
}
bool StepResult::stepped() const { return outcome_; }
double StepResult::grad_norm() const { return grad_norm_.defined() ? grad_norm_.item<double>() : 0.0; }
double StepResult::first_grad_norm() const {
  return first_grad_norm_.defined() ? first_grad_norm_.item<double>() : std::numeric_limits<double>::quiet_NaN();
}
double StepResult::scale() const { return scale_.item<double>(); }

namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

class Stepper::Impl {
 public:
  Impl(torch::nn::Module& model, torch::optim::Optimizer& optimizer, const StepperOptions& options)
      : options_(options),
        optimizer_(optimizer),
        parameters_(model, optimizer),
        ranks_(options.data_parallel, parameters_.all()),
        precision_(resolve_together(options.precision)),
        scaler_(detail::scaler_options(options.scaler, precision_)),
        guard_(detail::guard_options(options.precision_guard, options.precision)),
        window_(parameters_.all()) {
    if (options_.weights == Weights::Low) {
      parameters_.make_masters(precision_);
    } else {
      parameters_.check_full_weights(scaler_.is_enabled());
    }
    check_budget();
    prepare(scaler_);
    regions_.device = device().type();
  }

  c10::Device device() const { return parameters_.device(); }

  // The step, from top to bottom.
  StepResult step_over(const MicroBatches& source) {
    if (window_.size() > 0) {
      throw ConfigError(fmt::format(
          "Stepper.step: an accumulation window is open, with {} of {} micro-batches; fill it by accumulate(), or "
          "end it by flush() with tail Exact or Drop",
          window_.size(), options_.accumulate));
    }
    if (source.items < 1 && ranks_.is_alone()) {
      throw ConfigError("Stepper.step: the batch is empty");
    }
    return guarded([&] {
      begin_window();
      const int64_t size = options_.micro_batch == 0 ? source.items : std::min(options_.micro_batch, source.items);
      for (int64_t begin = 0; begin < source.items; begin += size) {
        const Range now{begin, std::min(begin + size, source.items)};
        std::optional<Range> ahead;
        if (now.end < source.items) {
          ahead = Range{now.end, std::min(now.end + size, source.items)};
        }
        const double parts = static_cast<double>(source.items) / static_cast<double>(now.end - now.begin);
        run_micro_batch([&] { return source.loss_of(now, ahead); }, {.items = now.end - now.begin,
                                                                     .parts = parts,
                                                                     .is_split = options_.micro_batch > 0,
                                                                     .is_last = now.end == source.items});
      }
      return end_window();
    });
  }

  std::optional<StepResult> accumulate_one(int64_t items, const std::function<Loss()>& loss_of) {
    return guarded([&]() -> std::optional<StepResult> {
      if (window_.size() == 0) {
        begin_window();
      }
      run_micro_batch(loss_of, {.items = items,
                                .parts = static_cast<double>(options_.accumulate),
                                .is_split = options_.accumulate > 1,
                                .is_last = window_.size() + 1 == options_.accumulate});
      if (window_.size() < options_.accumulate) {
        return std::nullopt;
      }
      return end_window();
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
    return guarded([&] { return end_window(); });
  }

  StateDict state_dict() const {
    if (window_.size() > 0) {
      throw ConfigError(
          "Stepper.state_dict: an accumulation window is open and its gradients are not part of the state; save "
          "between "
          "steps, or flush() first");
    }
    StateDict state;
    state.set("precision", std::string(to_string(precision_)));
    state.set("scaler", scaler_.state_dict());
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
    const Precision saved = precision_from_string(state.get<std::string>("precision"));
    if (options_.precision != Precision::Auto && saved != precision_) {
      throw ConfigError(
          fmt::format("Stepper.load_state_dict: the state is of a {} run, this one is {}; give the same precision",
                      to_string(saved), to_string(precision_)));
    }
    if (const bool had_masters = state.contains("masters"); had_masters != (options_.weights == Weights::Low)) {
      throw ConfigError(fmt::format(
          "Stepper.load_state_dict: the state is of a run with weights {}, this one has {}; give the same weights",
          had_masters ? "low" : "full", had_masters ? "full" : "low"));
    }
    // All that may throw comes before the first write.
    GradScaler scaler(detail::scaler_options(options_.scaler, saved));
    scaler.load_state_dict(state.get<StateDict>("scaler"));
    prepare(scaler);
    PrecisionGuard guard = guard_;
    if (guard.is_on() && state.contains("precision_guard")) {
      guard.restore(detail::regions_from(state.get<StateDict>("precision_guard")));
    }
    auto in_full = guard.full_regions();
    if (options_.weights == Weights::Low) {
      parameters_.load_masters(state.get<StateDict>("masters"));
    }
    precision_ = saved;
    scaler_ = std::move(scaler);
    guard_ = std::move(guard);
    regions_.in_full = std::move(in_full);
  }

  void sample_gradients() { sample_gradients_ = true; }
  Precision precision() const { return precision_; }
  const GradScaler& scaler() const { return scaler_; }

 private:
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
    if (!ranks_.is_alone()) {
      scaler.agree_by([this](const at::Tensor& found_inf) { ranks_.agree_on_largest(found_inf); });
    }
    make_scale(scaler);
  }

  // The scaler makes its tensors when it first scales; a step that is measured must not pay for them.
  at::Tensor make_scale(GradScaler& scaler) const {
    return scaler.scale(at::ones({}, at::TensorOptions().device(device())));
  }

  void check_budget() const {
    if (const Bytes live = live_bytes(device()); live > options_.memory_budget) {
      throw BudgetExceeded(
          fmt::format("Stepper: {} of tensors are alive outside of the step, more than memory_budget {}", live.str(),
                      options_.memory_budget.str()));
    }
    const MemoryLimit can_be_set(device(), options_.memory_budget);
  }

  // Runs a part of a step under the memory budget. If it fails, the window's gradients are dropped.
  template <class F>
  auto guarded(F&& part) -> decltype(part()) {
    try {
      check_budget();
      const MemoryLimit limit(device(), options_.memory_budget);
      return part();
    } catch (const c10::OutOfMemoryError& error) {
      give_up(detail::RankedStep::Failure::Memory);
      if (options_.memory_budget.is_unlimited()) {
        throw;
      }
      throw BudgetExceeded(fmt::format("Stepper.step: the step does not fit into memory_budget {}: {}",
                                       options_.memory_budget.str(), error.what_without_backtrace()));
    } catch (const BudgetExceeded&) {
      give_up(detail::RankedStep::Failure::Memory);
      throw;
    } catch (const DistributedError&) {
      give_up(detail::RankedStep::Failure::Group);
      throw;
    } catch (...) {
      give_up(detail::RankedStep::Failure::Other);
      throw;
    }
  }

  void give_up(detail::RankedStep::Failure failure) {
    abandon();
    ranks_.fail(failure, parameters_.all());
  }

  void abandon() {
    window_.abandon();
    scaler_.cancel();
    watch_.reset();
  }

  void begin_window() {
    parameters_.refresh();  // some may have been frozen, unfrozen or added
    window_ = AccumulationWindow(parameters_.all());
    first_grad_norm_.reset();
    batch_items_ = 0;
    window_.abandon();  // drops the last step's gradients
    window_.begin();
    start_ = Clock::now();
    level_ = live_bytes(device()).count();
    watch_.emplace(device());
    ranks_.begin(options_.weights == Weights::Low);
  }

  void run_micro_batch(const std::function<Loss()>& loss_of, const MicroBatch& micro) {
    batch_items_ += micro.items;
    const detail::PrecisionRegionsScope regions(guard_.is_on() ? &regions_ : nullptr);
    std::optional<NoSync> quiet;
    if (ranks_.is_quiet(micro.is_last)) {
      quiet.emplace(ranks_.parallel());
    }
    const at::Tensor weighted = ranks_.forward([&] { return weighted_loss(loss_of, micro); });
    if (weighted.defined()) {
      scaler_.scale(weighted).backward();
      parameters_.gather_gradients();
      if (options_.gradient_noise && micro.is_split && window_.size() == 1 && std::isfinite(window_.to_mean())) {
        first_grad_norm_ = grad_norm(parameters_.updated()) * window_.to_mean();
        first_batch_items_ = micro.items;
      }
    }
  }

  at::Tensor weighted_loss(const std::function<Loss()>& loss_of, const MicroBatch& micro) {
    std::optional<Autocast> autocast;
    std::optional<PrecisionScope> whole_step_in_fp32;
    if (precision_ != Precision::Float32) {
      autocast.emplace(device().type(), compute_dtype(precision_),
                       AutocastOptions{.fp32_reductions = options_.fp32_reductions});
    }
    if (guard_.is_full("")) {
      whole_step_in_fp32.emplace("");
    }
    const Loss loss = loss_of();
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
    if (ranks_.is_alone()) {
      return window_.close();
    }
    if (!ranks_.is_agreed()) {  // no data here
      window_.divide_by(ranks_.agree_on_items(0));
    }
    window_.check_parameters();
    ranks_.send_the_rest(parameters_.all());
    return window_.close([&](int64_t& items, at::Tensor& loss_sum) { ranks_.sum(items, loss_sum, batch_items_); });
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
    result.activation_peak_bytes = watch_->peak() - level_ - parameters_.gradient_bytes();
    if (totals.items > 0) {
      std::optional<LostUpdates> lost_updates;
      scaler_.unscale_(optimizer_);
      if (std::exchange(sample_gradients_, false)) {
        result.gradient_statistics = gradient_statistics(parameters_.all());
        if (precision_ != Precision::Float32) {
          lost_updates.emplace(parameters_.all(), compute_dtype(precision_));
        }
      }
      if (guard_.is_on() && precision_ != Precision::Float32) {
        result.precision_changes = guard_.observe(detail::gradient_evidence(parameters_.all(), regions_.entered));
        regions_.in_full = guard_.full_regions();
      }
      const auto updated = parameters_.updated();
      result.grad_norm_ = options_.clip_norm > 0 ? clip_grad_norm_(updated, options_.clip_norm) : grad_norm(updated);
      result.outcome_ = scaler_.step(optimizer_);
      if (lost_updates && result.stepped()) {
        lost_updates->add_to(result.gradient_statistics);
      }
      parameters_.scatter();
      scaler_.update();
    }
    if (options_.check_replicas_every > 0 && ++steps_ % options_.check_replicas_every == 0) {
      options_.data_parallel->check_replicas();
    }
    result.bytes_sent = ranks_.bytes_sent();
    result.communication_seconds = ranks_.communication().total;
    result.communication_waited = ranks_.communication().waited;
    ranks_.end();
    result.peak_bytes = watch_->peak();
    result.seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    watch_.reset();
    return result;
  }

  StepperOptions options_;
  torch::optim::Optimizer& optimizer_;
  detail::TrainedParameters parameters_;
  detail::RankedStep ranks_;
  Precision precision_;
  GradScaler scaler_;
  PrecisionGuard guard_;
  detail::PrecisionRegions regions_;
  AccumulationWindow window_;
  at::Tensor first_grad_norm_;  // of the first micro-batch's mean, still scaled
  bool sample_gradients_ = false;
  int64_t first_batch_items_ = 0;
  int64_t batch_items_ = 0;
  int64_t steps_ = 0;
  Clock::time_point start_;
  int64_t level_ = 0;  // bytes alive before the step
  std::optional<detail::PeakWatch> watch_;
};

Stepper::Stepper(torch::nn::Module& model, torch::optim::Optimizer& optimizer, const StepperOptions& options, int) {
  detail::check(options);
  impl_ = std::make_unique<Impl>(model, optimizer, options);
}

Stepper::~Stepper() = default;
Stepper::Stepper(Stepper&&) noexcept = default;

StepResult Stepper::step_over(const MicroBatches& source) { return impl_->step_over(source); }

std::optional<StepResult> Stepper::accumulate_one(int64_t items, const std::function<Loss()>& loss_of) {
  if (items < 1) {
    throw ConfigError("Stepper.accumulate: the micro-batch is empty");
  }
  return impl_->accumulate_one(items, loss_of);
}

std::optional<StepResult> Stepper::flush() { return impl_->flush(); }
c10::Device Stepper::device() const { return impl_->device(); }
Precision Stepper::precision() const { return impl_->precision(); }
void Stepper::sample_gradients() { impl_->sample_gradients(); }
std::map<std::string, at::Tensor> Stepper::full_precision_parameters() const {
  return impl_->full_precision_parameters();
}
const GradScaler& Stepper::scaler() const { return impl_->scaler(); }
StateDict Stepper::state_dict() const { return impl_->state_dict(); }
void Stepper::load_state_dict(const StateDict& state) { impl_->load_state_dict(state); }

}  // namespace snug
