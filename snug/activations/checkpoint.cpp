#include "snug/activations/checkpoint.h"

#include <atomic>
#include <mutex>
#include <optional>

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "snug/activations/detail/not_adopted.h"
#include "snug/activations/detail/region_operators.h"
#include "snug/activations/detail/tensor_hash.h"
#include "snug/core/error.h"
#include "snug/core/rng.h"
#include "snug/memory/detail/saved_tensor_policy.h"
#include "snug/precision/detail/autocast_state.h"

// In forward each saved tensor is replaced by a Slot, numbered in order of saving. The first Slot that backward asks for runs the
// callable again; its saved tensors, numbered in the same order, fill the Slots that are still alive. A Slot gives its tensor
// away once per backward pass, so memory falls as backward proceeds. Slots own their Frame, so a Frame dies with the last node
// that may need it.
//
// The inputs are SavedVariables: inside an enclosing region they are saved tensors of that region, and dropped like all others.
// That makes nesting work to any depth with no further code. A recomputation inside a recomputation starts a Frame of its own.
//
// detail/region_operators.h has what happens to memory from outside of the region, and to results that a policy keeps.
//
// Backward passes inside the callable save tensors too, and may ask for Slots before the forward has come to its end.

namespace snug::detail {
namespace {

struct Metadata {
  std::vector<int64_t> sizes;
  c10::ScalarType dtype;
  c10::Device device;
  std::optional<uint64_t> values;  // a hash, for Determinism::Values

  Metadata(const at::Tensor& t, bool with_values)
      : sizes(t.is_nested() ? std::vector<int64_t>() : t.sizes().vec()),
        dtype(t.scalar_type()),
        device(t.device()),
        values(with_values ? std::optional(tensor_hash(t)) : std::nullopt) {}
  bool is_alike(const Metadata& other) const {
    return sizes == other.sizes && dtype == other.dtype && device == other.device;
  }
  std::string str() const {
    return fmt::format("{}[{}] on {}", c10::toString(dtype), fmt::join(sizes, ", "), device.str());
  }
};

constexpr size_t kSmallRegion = 16384;  // bytes

thread_local bool saving_inputs_of_a_region = false;

struct Frame;

struct Slot {
  std::shared_ptr<Frame> frame;
  size_t index;
  int pass = -1;  // the backward pass that `recomputed` is of; only the last one's is kept
  at::Tensor recomputed = {};
};

struct Frame : std::enable_shared_from_this<Frame> {
  FrameOptions options;
  std::vector<torch::autograd::SavedVariable> inputs;
  bool input_was_written = false;  // then there is nothing to recompute from
  bool forward_is_complete = false;
  std::function<void(const std::vector<at::Tensor>&)> recompute_fn;
  AutocastState autocast;
  c10::impl::LocalDispatchKeySet dispatch = c10::impl::tls_local_dispatch_key_set();
  RegionOperators operators;
  std::optional<RngState> rng;
  std::vector<std::weak_ptr<Slot>> slots;
  std::vector<Metadata> metadata;
  std::recursive_mutex mutex;  // one thread recomputes at a time; the callable may go backward through the same Frame

  at::Tensor take(Slot& slot);
  void recompute(int pass);
  size_t slots_needed() const;
  std::string name() const { return options.label.empty() ? "checkpoint" : "checkpoint '" + options.label + "'"; }
};

class ForwardPolicy final : public SavedTensorPolicy {
 public:
  explicit ForwardPolicy(std::shared_ptr<Frame> frame) : frame_(std::move(frame)) {}

  std::any pack(const at::Tensor& tensor) override {
    auto slot = std::make_shared<Slot>(Slot{.frame = frame_, .index = frame_->slots.size()});
    frame_->slots.emplace_back(slot);
    const auto& sequence = frame_->operators.sequence;
    const bool with_values = frame_->options.determinism == Determinism::Values &&
                             (sequence.empty() || !is_workspace(sequence.back(), tensor));
    frame_->metadata.emplace_back(tensor, with_values);
    return slot;
  }
  at::Tensor unpack(std::any& packed) override {
    auto& slot = *std::any_cast<std::shared_ptr<Slot>&>(packed);
    return not_adopted(slot.frame->take(slot));
  }

 private:
  std::shared_ptr<Frame> frame_;
};

class RecomputePolicy final : public SavedTensorPolicy {
 public:
  RecomputePolicy(Frame& frame, int pass, RecomputeOperators& operators)
      : frame_(frame), pass_(pass), operators_(operators), needed_(frame.slots_needed()) {}

  std::any pack(const at::Tensor& tensor) override {
    const size_t index = count_++;
    saved_bytes_ += tensor.has_storage() ? tensor.storage().nbytes() : kSmallRegion;
    at::Tensor kept = tensor.detach();
    if (index < frame_.slots.size()) {
      check(index, tensor);
      if (const auto slot = frame_.slots[index].lock()) {
        slot->pass = pass_;
        slot->recomputed = kept;
        mark_as_saved(kept);
      }
    }
    const bool may_stop = task_ == torch::autograd::get_current_graph_task_id();
    if (has_enough() && may_stop && !is_cheaper_to_finish(index)) {
      if (saving_inputs_of_a_region) {
        throw RecomputedEnough{};  // before its callable is called for nothing
      }
      operators_.stop_before_next(task_);
    }
    return kept;  // for a backward inside the region
  }
  at::Tensor unpack(std::any& packed) override { return not_adopted(std::any_cast<at::Tensor&>(packed)); }

  size_t count() const { return count_; }
  bool has_enough() const { return frame_.options.early_stop && count_ >= needed_; }

 private:
  // A throw through LibTorch takes as long as several small operators: where there is but one, which is under way, it is let to its end.
  bool is_cheaper_to_finish(size_t index) const {
    return frame_.operators.sequence.size() == 1 && index < frame_.slots.size() && saved_bytes_ < kSmallRegion &&
           !saving_inputs_of_a_region;
  }
  void check(size_t index, const at::Tensor& tensor) const {
    if (frame_.options.determinism == Determinism::None) {
      return;
    }
    const Metadata& then = frame_.metadata[index];
    const Metadata now(tensor, then.values.has_value());
    if (!now.is_alike(then)) {
      throw Error(
          fmt::format("{}: saved tensor {}, {}, was {} in forward and is {} in the recomputation; the callable must do "
                      "the same each time (does it depend on state that changed since?)",
                      frame_.name(), index, operators_.place(), then.str(), now.str()));
    }
    // What the region itself writes, autograd saves as it is now: its own check of versions is the judge.
    const bool is_written = frame_.operators.overwritten.contains(memory_of(tensor));
    if (now.values != then.values && !is_written) {
      throw Error(
          fmt::format("{}: saved tensor {}, {}, has other values in the recomputation than in forward ({}); was a "
                      "parameter or a captured tensor written in between, or does an operator differ from run to run?",
                      frame_.name(), index, operators_.place(), now.str()));
    }
  }

  Frame& frame_;
  int pass_;
  RecomputeOperators& operators_;  // packing, for which it is there, ends with the recomputation
  int task_ = torch::autograd::get_current_graph_task_id();  // the backward pass around the callable
  size_t needed_;
  size_t count_ = 0;
  size_t saved_bytes_ = 0;
};

class SavingInputs {
 public:
  SavingInputs() : before_(std::exchange(saving_inputs_of_a_region, true)) {}
  ~SavingInputs() { saving_inputs_of_a_region = before_; }
  SavingInputs(const SavingInputs&) = delete;
  SavingInputs& operator=(const SavingInputs&) = delete;

 private:
  bool before_;
};

// Outside a backward pass each request is a pass of its own.
int current_pass() {
  static std::atomic<int> next_own_pass{-2};
  const int task = torch::autograd::get_current_graph_task_id();
  return task >= 0 ? task : next_own_pass--;
}

at::Tensor Frame::take(Slot& slot) {
  const int pass = current_pass();
  const std::lock_guard lock(mutex);
  const auto is_there = [&] { return slot.pass == pass && slot.recomputed.defined(); };
  if (!is_there()) {
    recompute(pass);
  }
  if (!is_there()) {
    throw Error(fmt::format("{}: the recomputation did not save tensor {} again", name(), slot.index));
  }
  return std::exchange(slot.recomputed, {});
}

size_t Frame::slots_needed() const {
  size_t needed = slots.size();
  while (needed > 0 && slots[needed - 1].expired()) {
    --needed;
  }
  return needed;
}

void Frame::recompute(int pass) {
  if (input_was_written) {
    throw Error(fmt::format("{}: cannot recompute, since the callable wrote to an argument in place", name()));
  }
  std::vector<at::Tensor> arguments;
  for (const auto& input : inputs) {
    arguments.push_back(input.unpack());
  }
  std::optional<RngGuard> rng_guard;
  if (rng) {
    rng_guard.emplace();
    rng->restore();
  }
  const c10::impl::ForceDispatchKeyGuard dispatch_scope(dispatch);
  const AutocastStateScope autocast_scope(autocast);
  const at::AutoGradMode enable_grad(true);
  RecomputeOperators seen(operators);
  const OperatorScope operator_scope(seen);
  const auto policy = std::make_shared<RecomputePolicy>(*this, pass, seen);
  const PolicyScope scope(policy);
  try {
    recompute_fn(arguments);
  } catch (const RecomputedEnough&) {
  }
  if (policy->has_enough()) {
    return;
  }
  // A callable whose forward is under way has more to save.
  if (forward_is_complete ? policy->count() != slots.size() : policy->count() < slots.size()) {
    throw Error(fmt::format(
        "{}: {} tensors were saved in forward and {} in the recomputation, {}; the callable must do the same "
        "each time (does it depend on state that changed since?)",
        name(), slots.size(), policy->count(), seen.place()));
  }
}

}  // namespace

class CheckpointForward::Impl {
 public:
  Impl(FrameOptions options, const std::vector<at::Tensor>& inputs,
       std::function<void(const std::vector<at::Tensor>&)> recompute)
      : frame_(std::make_shared<Frame>()) {
    install_engine();
    frame_->options = std::move(options);
    {
      const SavingInputs saving;
      for (const at::Tensor& input : inputs) {
        frame_->inputs.emplace_back(input, /*is_output=*/false);
        versions_.push_back(input.defined() ? std::optional<Version>(input) : std::nullopt);
      }
    }
    frame_->recompute_fn = std::move(recompute);
    frame_->autocast = AutocastState::capture();
    if (frame_->options.preserve_rng_state) {
      frame_->rng = RngState::capture();
    }
    scope_.emplace(std::make_shared<ForwardPolicy>(frame_));
    operators_.emplace(frame_->operators, frame_->options.policy, frame_->options.preserve_rng_state);
    operator_scope_.emplace(*operators_);
  }

  // An input that was written in place hangs from a node of the region, whose Slots keep the Frame: with its inputs it would never die.
  ~Impl() {
    if (written_input()) {
      frame_->inputs.clear();
      frame_->input_was_written = true;
    }
  }

  void finish() {
    if (const auto written = written_input()) {
      throw ConfigError(
          fmt::format("{}: the callable wrote to argument tensor {} in place, which its recomputation could not undo; "
                      "write out of place, or to a clone",
                      frame_->name(), *written));
    }
    if (operators_->wrote_to_outside_graph()) {
      throw ConfigError(fmt::format(
          "{}: the callable wrote in place, with a gradient, to a tensor that it captured, as in aux += ...; "
          "return what is to be added, or write under NoGradGuard",
          frame_->name()));
    }
    if (operators_->wrote_to_outside_sparse()) {
      throw ConfigError(fmt::format(
          "{}: the callable wrote to a tensor from outside that cannot be copied (a sparse one), so that its "
          "recomputation would write once more; write out of place, or outside of the region",
          frame_->name()));
    }
    operators_->close();
    if (frame_->rng && *frame_->rng == RngState::capture()) {
      frame_->rng.reset();  // nothing was drawn, so there is nothing to draw again
    }
    frame_->forward_is_complete = true;
  }

 private:
  // The counter is shared with the tensor but does not hold its memory.
  struct Version {
    c10::VariableVersion counter;
    uint32_t at_start;
    explicit Version(const at::Tensor& t)
        : counter(torch::autograd::impl::version_counter(t)), at_start(counter.current_version()) {}
  };

  std::optional<size_t> written_input() const {
    for (size_t i = 0; i < versions_.size(); ++i) {
      if (versions_[i] && versions_[i]->counter.current_version() != versions_[i]->at_start) {
        return i;
      }
    }
    return std::nullopt;
  }

  std::vector<std::optional<Version>> versions_;  // of the inputs
  std::shared_ptr<Frame> frame_;
  std::optional<PolicyScope> scope_;
  std::optional<ForwardOperators> operators_;
  std::optional<OperatorScope> operator_scope_;
};

CheckpointForward::CheckpointForward(FrameOptions options, std::vector<at::Tensor> inputs,
                                     std::function<void(const std::vector<at::Tensor>&)> recompute)
    : impl_(std::make_unique<Impl>(std::move(options), inputs, std::move(recompute))) {}

CheckpointForward::~CheckpointForward() = default;

void CheckpointForward::finish() { impl_->finish(); }

}  // namespace snug::detail
