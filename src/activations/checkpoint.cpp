// How backward gets the saved tensors of a region
//
// Problem: autograd keeps each tensor that it saves in forward until backward. A region may keep only its inputs, and
// must still give autograd the same tensors, equal to the bit.
//
// Options: a custom function whose backward runs the callable and then a backward pass of its own (PyTorch's reentrant
// form, without torch::autograd::grad), or hooks on saved tensors (PyTorch's non-reentrant form).
//
// Choice: hooks. In forward each saved tensor is replaced by a Slot, numbered in order of saving. When backward asks
// for the first Slot, the callable runs again. The saved tensors of the recomputation, numbered in the same order, fill
// the Slots that are still alive.
//
// Consequences:
// - A Slot gives its tensor away once per backward pass, so memory falls as backward proceeds.
// - Slots own their Frame, so a Frame dies with the last node that may need the Frame.
// - The inputs are SavedVariables: inside an enclosing region the inputs are saved tensors of the enclosing region, and
//   dropped like all others. So nesting works to any depth with no further code. A recomputation inside a recomputation
//   starts a Frame of its own.
// - Backward passes inside the callable save tensors too, and may ask for Slots before the forward has come to its end.
// - Both runs must make the same tensors. region_operators.cpp handles memory from outside of the region, results that
//   a policy keeps, and random numbers.
// - Forward-mode AD: LibTorch forgets all tangents when their level ends, before backward. So the tangents of the
//   inputs are inputs too, and the recomputation has a level of its own, unless a level is open already.

#include "snug/checkpoint.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_make_dual.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/forward_grad.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/python/update_graph_executor_opt.h>

#include "snug/core.h"
#include "snug/state.h"
#include "src/activations/region_operators.h"
#include "src/activations/slice_scope.h"
#include "src/activations/tensor_hash.h"
#include "src/activations/training_modes.h"
#include "src/core/has_bytes.h"
#include "src/memory/custom_function.h"
#include "src/memory/saved_tensor_policy.h"
#include "src/precision/autocast_state.h"

namespace snug::detail {
namespace {

// At first TorchScript runs a function operator by operator, to profile the function. Later TorchScript turns the
// function into a graph, which saves other tensors in another order. While this object lives, a function without a
// graph does not become a graph on this thread.
class [[nodiscard]] TorchScriptAsItIs final {
 public:
  TorchScriptAsItIs() { torch::jit::setGraphExecutorOptimize(false); }
  ~TorchScriptAsItIs() { torch::jit::setGraphExecutorOptimize(before_); }
  TorchScriptAsItIs(const TorchScriptAsItIs&) = delete;
  TorchScriptAsItIs& operator=(const TorchScriptAsItIs&) = delete;

 private:
  bool before_ = torch::jit::getGraphExecutorOptimize();
};

struct Metadata {
  std::vector<int64_t> sizes;
  c10::ScalarType dtype;
  c10::Device device;
  Origin origin;
  std::optional<uint64_t> values;  // a hash, if values are compared
  bool is_filled_later = false;    // by the operator that runs next after the save

  Metadata(const at::Tensor& t, Origin its_origin, bool with_values)
      : sizes(t.is_nested() ? std::vector<int64_t>() : t.sizes().vec()),
        dtype(t.scalar_type()),
        device(t.device()),
        origin(its_origin),
        values(with_values ? std::optional(tensor_hash(t)) : std::nullopt) {}
  bool is_alike(const Metadata& other) const {
    return sizes == other.sizes && dtype == other.dtype && device == other.device;
  }
  bool came_about_like(const Metadata& other) const {
    return origin == other.origin || origin == 0 || other.origin == 0;
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
  int pass = -1;  // the backward pass of `recomputed`; only the last pass's tensor is kept
  at::Tensor recomputed = {};
};

constexpr uint64_t kLevel = 0;  // LibTorch has one level of forward-mode AD, for the process

bool is_forward_mode() { return torch::autograd::ForwardADLevel::try_get_by_idx(kLevel) != nullptr; }

class ForwardModeScope {
 public:
  explicit ForwardModeScope(bool is_needed) : is_mine_(is_needed && !is_forward_mode()) {
    if (is_mine_) {
      torch::autograd::ForwardADLevel::get_next_idx();
    }
  }
  ~ForwardModeScope() {
    if (is_mine_) {
      torch::autograd::ForwardADLevel::release_idx(kLevel);
    }
  }
  ForwardModeScope(const ForwardModeScope&) = delete;
  ForwardModeScope& operator=(const ForwardModeScope&) = delete;

 private:
  bool is_mine_;
};

// The inputs of a region may be the only owner of the region before, and so on to the first region. Regions are
// released one after the other. Releasing each region inside the next would need a stack as deep as the chain is long.
struct Beginning {
  std::vector<torch::autograd::SavedVariable> inputs = {};
  std::vector<torch::autograd::SavedVariable> tangents = {};  // one for each input, if any input has a tangent
  std::function<void(const std::vector<at::Tensor>&)> recompute = {};
  TrainingModes modes = TrainingModes(nullptr);

  void let_go() {
    thread_local std::vector<Beginning>* waiting = nullptr;
    if (waiting != nullptr) {
      waiting->push_back(std::exchange(*this, {}));
      return;
    }
    std::vector<Beginning> mine;
    mine.push_back(std::exchange(*this, {}));
    for (waiting = &mine; !mine.empty();) {
      const Beginning last = std::move(mine.back());
      mine.pop_back();
    }
    waiting = nullptr;
  }
};

struct Frame {
  ~Frame() { begin.let_go(); }

  CheckpointOptions options;
  Beginning begin;
  bool input_was_written = false;  // then the recomputation has no input to start from
  bool forward_is_complete = false;
  bool was_forward_mode = is_forward_mode();
  // A backward pass inside the forward recomputed tensors. The recomputation will find these tensors ready, so the
  // operators after them have other origins.
  bool was_recomputed_in_forward = false;
  AutocastState autocast;
  int64_t slices = SliceScope::current();
  c10::impl::LocalDispatchKeySet dispatch = c10::impl::tls_local_dispatch_key_set();
  RegionOperators operators;
  std::vector<std::weak_ptr<Slot>> slots;
  std::vector<Metadata> metadata;
  const torch::autograd::Node* asking = nullptr;  // a custom function: may ask for its slots again
  std::vector<size_t> asked_for;
  std::recursive_mutex mutex;  // one thread recomputes at a time; the callable may go backward through the same Frame

  at::Tensor take(Slot& slot);
  void let_go_unless_asked_by(const torch::autograd::Node* node);
  void recompute(int pass);
  size_t slots_needed() const;
  std::vector<at::Tensor> arguments() const;
  std::string cure() const;
  std::string name() const { return options.label.empty() ? "checkpoint" : "checkpoint '" + options.label + "'"; }
};

class ForwardPolicy final : public SavedTensorPolicy {
 public:
  ForwardPolicy(std::shared_ptr<Frame> frame, ForwardOperators& operators)
      : frame_(std::move(frame)), operators_(operators) {}

  std::any pack(const at::Tensor& tensor) override {
    auto slot = std::make_shared<Slot>(Slot{.frame = frame_, .index = frame_->slots.size()});
    frame_->slots.emplace_back(slot);
    const bool with_values = compares_values_of(tensor);
    frame_->metadata.emplace_back(tensor, operators_.origin_of(tensor), with_values);
    if (with_values) {
      operators_.saved(tensor, [this, index = slot->index](const at::Tensor& filled) {
        frame_->metadata[index].values = tensor_hash(filled);
        frame_->metadata[index].is_filled_later = true;
      });
    }
    return slot;
  }
  at::Tensor unpack(std::any& packed) override {
    auto& slot = *std::any_cast<std::shared_ptr<Slot>&>(packed);
    return slot.frame->take(slot);
  }

 private:
  bool compares_values_of(const at::Tensor& tensor) {
    const auto& sequence = frame_->operators.sequence;
    if (!sequence.empty() && is_workspace(sequence.back(), tensor)) {
      return false;
    }
    const Determinism asked = frame_->options.determinism;
    return asked == Determinism::Values ||
           (asked == Determinism::Metadata && tensor.device().is_cpu() && operators_.must_compare_values());
  }

  std::shared_ptr<Frame> frame_;
  ForwardOperators& operators_;  // needed for packing, which ends with the forward
};

class RecomputePolicy final : public SavedTensorPolicy {
 public:
  RecomputePolicy(Frame& frame, int pass, RecomputeOperators& operators)
      : frame_(frame), pass_(pass), operators_(operators), needed_(frame.slots_needed()) {
    if (frame.operators.draws && frame.operators.draws->has_moved) {
      generators_ = RngState::capture();
    }
  }

  std::any pack(const at::Tensor& tensor) override {
    const size_t index = count_++;
    saved_bytes_ += has_bytes(tensor) ? tensor.storage().nbytes() : kSmallRegion;
    operators_.saved(tensor);
    const auto kept = std::make_shared<at::Tensor>(tensor.detach());
    mark_as_saved(*kept);
    kept_.push_back(kept);
    if (index < frame_.slots.size()) {
      check(index, tensor);
      if (const auto slot = frame_.slots[index].lock()) {
        slot->pass = pass_;
        slot->recomputed = *kept;
      }
    }
    const bool may_stop = task_ == current_pass();
    if (has_enough() && may_stop && !is_cheaper_to_finish(index)) {
      if (saving_inputs_of_a_region) {
        operators_.stop();  // before the inner region's callable runs for nothing
      }
      operators_.stop_before_use(task_);
    }
    return kept;  // for a backward inside the region
  }
  at::Tensor unpack(std::any& packed) override {
    const auto& kept = *std::any_cast<std::shared_ptr<at::Tensor>&>(packed);
    if (!kept.defined()) {
      throw Error(
          "checkpoint: backward through a result of a recomputation, which is over; a callable that stores results "
          "stores those of its last run, so go backward through them before the backward pass that recomputes it");
    }
    return kept;
  }

  // The recomputation is over. Its saved tensors were for the Slots. The saved tensors must not stay alive with results
  // of the recomputation that the callable stored.
  void close() {
    for (const auto& one : kept_) {
      if (const auto kept = one.lock()) {
        kept->reset();
      }
    }
  }

  size_t count() const { return count_; }
  bool has_enough() const { return frame_.options.early_stop && count_ >= needed_; }

 private:
  // A throw through LibTorch takes as long as several small operators. If only one operator is left, and the operator
  // is running, letting it finish is cheaper.
  bool is_cheaper_to_finish(size_t index) const {
    return frame_.operators.sequence.size() == 1 && index < frame_.slots.size() && saved_bytes_ < kSmallRegion &&
           !saving_inputs_of_a_region;
  }
  void check(size_t index, const at::Tensor& tensor) {
    if (frame_.options.determinism == Determinism::None) {
      return;
    }
    const Metadata& then = frame_.metadata[index];
    const Metadata now(tensor, operators_.origin_of(tensor), /*with_values=*/false);
    if (!now.is_alike(then)) {
      throw Error(fmt::format("{}: saved tensor {}, {}, was {} in forward and is {} in the recomputation; {}",
                              frame_.name(), index, operators_.place(), then.str(), now.str(), frame_.cure()));
    }
    if (!frame_.was_recomputed_in_forward && !now.came_about_like(then)) {
      throw Error(
          fmt::format("{}: saved tensor {}, {}, {}, came about in another way in forward than in the recomputation; {}",
                      frame_.name(), index, operators_.place(), now.str(), frame_.cure()));
    }
    if (then.is_filled_later) {
      operators_.saved_unfilled(tensor, [this, index](const at::Tensor& filled) { check_values(index, filled); });
    } else if (then.values) {
      check_values(index, tensor);
    }
  }
  void check_values(size_t index, const at::Tensor& tensor) const {
    // Autograd saves memory that the region itself writes with the memory's current values; autograd's own version
    // check decides.
    const bool is_written = frame_.operators.overwritten.contains(memory_of(tensor));
    if (is_written || tensor_hash(tensor) == frame_.metadata[index].values) {
      return;
    }
    const std::string what =
        fmt::format("{}: saved tensor {}, {}, has other values in the recomputation than in forward", frame_.name(),
                    index, operators_.place());
    if (frame_.options.determinism == Determinism::Values) {
      throw Error(what +
                  "; was a parameter or a captured tensor written in between, or does an operator differ from run to "
                  "run?");
    }
    if (generators_ && !generators_->is_current()) {
      throw Error(what +
                  ", and the default random generators have moved in both without an operator of the region; if a "
                  "function of yours draws from them, set CheckpointOptions::draws_unseen, or draw by operators");
    }
  }

  Frame& frame_;
  int pass_;
  RecomputeOperators& operators_;  // needed for packing, which ends with the recomputation
  // The generators' states at the beginning, if the region looks for draws outside of operators. Operators do not move
  // the generators here.
  std::optional<RngState> generators_;
  int task_ = current_pass();  // the backward pass around the callable
  size_t needed_;
  size_t count_ = 0;
  size_t saved_bytes_ = 0;
  std::vector<std::weak_ptr<at::Tensor>> kept_;  // the owner is the recomputation's graph
};

struct ClosedAtEnd {
  explicit ClosedAtEnd(RecomputePolicy& closed) : policy(closed) {}
  ~ClosedAtEnd() { policy.close(); }
  ClosedAtEnd(const ClosedAtEnd&) = delete;
  ClosedAtEnd& operator=(const ClosedAtEnd&) = delete;
  RecomputePolicy& policy;
};

// A tangent for each input, or no tangents at all.
std::vector<at::Tensor> tangents_of(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> tangents;
  bool any = false;
  for (size_t i = 0; is_forward_mode() && i < inputs.size(); ++i) {
    tangents.push_back(inputs[i].defined() ? at::Tensor(inputs[i]._fw_grad(kLevel)) : at::Tensor());
    any = any || tangents.back().defined();
  }
  return any ? tangents : std::vector<at::Tensor>();
}

// Outside a backward pass each request is a pass of its own.
int pass_of_request() {
  static std::atomic<int> next_own_pass{-2};
  const int pass = current_pass();
  return pass >= 0 ? pass : next_own_pass--;
}

// Autograd's own nodes ask once for each tensor. A custom function may ask again, until another node asks.
const torch::autograd::Node* custom_function_that_asks() {
  const auto node = torch::autograd::get_current_node();
  return node == nullptr || !is_custom_function(*node) ? nullptr : node.get();
}

void Frame::let_go_unless_asked_by(const torch::autograd::Node* node) {
  if (std::exchange(asking, node) != node) {
    for (const size_t index : std::exchange(asked_for, {})) {
      if (const auto slot = slots[index].lock()) {
        slot->recomputed.reset();
      }
    }
  }
}

at::Tensor Frame::take(Slot& slot) {
  const int pass = pass_of_request();
  const std::lock_guard lock(mutex);
  let_go_unless_asked_by(custom_function_that_asks());
  const auto is_there = [&] { return slot.pass == pass && slot.recomputed.defined(); };
  if (!is_there()) {
    recompute(pass);
  }
  if (!is_there()) {
    throw Error(fmt::format("{}: the recomputation did not save tensor {} again", name(), slot.index));
  }
  if (asking == nullptr) {
    return std::exchange(slot.recomputed, {});
  }
  asked_for.push_back(slot.index);
  return slot.recomputed;
}

size_t Frame::slots_needed() const {
  size_t needed = slots.size();
  while (needed > 0 && slots[needed - 1].expired()) {
    --needed;
  }
  return needed;
}

// The recomputation's level of forward-mode AD must be open.
std::vector<at::Tensor> Frame::arguments() const {
  std::vector<at::Tensor> all;
  for (size_t i = 0; i < begin.inputs.size(); ++i) {
    at::Tensor input = begin.inputs[i].unpack();
    const at::Tensor tangent = begin.tangents.empty() ? at::Tensor() : begin.tangents[i].unpack();
    const bool is_lost = tangent.defined() && !input._fw_grad(kLevel).defined();
    all.push_back(is_lost ? at::_make_dual(input, tangent, kLevel) : std::move(input));
  }
  return all;
}

std::string Frame::cure() const {
  return std::string("the callable must do the same each time (does it depend on state that changed since?)") +
         (was_forward_mode ? "; under forward-mode AD, pass every tensor that has a tangent as an argument: those of "
                             "captured tensors are lost before backward"
                           : "");
}

void Frame::recompute(int pass) {
  if (input_was_written) {
    throw Error(fmt::format("{}: cannot recompute, since the callable wrote to an argument in place", name()));
  }
  was_recomputed_in_forward = was_recomputed_in_forward || !forward_is_complete;
  const ForwardModeScope forward_mode(!begin.tangents.empty());
  const std::vector<at::Tensor> inputs = arguments();
  const c10::impl::ForceDispatchKeyGuard dispatch_scope(dispatch);
  const AutocastStateScope autocast_scope(autocast);
  const at::AutoGradMode enable_grad(true);
  const SliceScope slice_scope(slices);
  const TorchScriptAsItIs torch_script;
  RecomputeOperators seen(operators, inputs, name());
  const OperatorScope operator_scope(seen);
  const auto policy = std::make_shared<RecomputePolicy>(*this, pass, seen);
  const PolicyScope scope(policy);
  const ClosedAtEnd closed(*policy);
  try {
    const TrainingModes::Scope modes_scope(begin.modes);
    begin.recompute(inputs);
  } catch (...) {
    if (!seen.has_stopped()) {
      throw;
    }
  }
  if (policy->has_enough()) {
    return;
  }
  // A callable whose forward is under way has more to save.
  if (forward_is_complete ? policy->count() != slots.size() : policy->count() < slots.size()) {
    throw Error(fmt::format("{}: {} tensors were saved in forward and {} in the recomputation, {}; {}", name(),
                            slots.size(), policy->count(), seen.place(), cure()));
  }
}

}  // namespace

class CheckpointForward::Impl {
 public:
  Impl(CheckpointOptions options, const std::vector<at::Tensor>& inputs,
       std::function<void(const std::vector<at::Tensor>&)> recompute)
      : frame_(std::make_shared<Frame>()) {
    install_engine();
    if (options.draws_unseen && !options.preserve_rng_state) {
      throw ConfigError("checkpoint: draws_unseen repeats random numbers, which preserve_rng_state = false forbids");
    }
    frame_->options = std::move(options);
    {
      const Replaced saving(saving_inputs_of_a_region, true);
      for (const at::Tensor& input : inputs) {
        frame_->begin.inputs.emplace_back(input, /*is_output=*/false);
        writes_.push_back(input.defined() ? WriteCount(input) : WriteCount());
      }
      const std::vector<at::Tensor> tangents = tangents_of(inputs);
      for (const at::Tensor& tangent : tangents) {
        frame_->begin.tangents.emplace_back(tangent, /*is_output=*/false);
      }
    }
    frame_->begin.recompute = std::move(recompute);
    frame_->begin.modes = TrainingModes(std::exchange(frame_->options.module, nullptr));
    frame_->autocast = AutocastState::capture();
    operators_.emplace(frame_->operators, inputs, frame_->options.policy, frame_->options.preserve_rng_state,
                       frame_->options.draws_unseen);
    scope_.emplace(std::make_shared<ForwardPolicy>(frame_, *operators_));
    operator_scope_.emplace(*operators_);
  }

  // An input that was written in place hangs from a node of the region, whose Slots keep the Frame. A Frame that kept
  // this input would never die.
  ~Impl() {
    if (written_input()) {
      frame_->begin.inputs.clear();
      frame_->begin.tangents.clear();
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
          "{}: the callable wrote to a tensor from outside that cannot be copied (a sparse one, or a wrapper), so that "
          "its recomputation would write once more; write out of place, or outside of the region",
          frame_->name()));
    }
    operators_->close();
    frame_->forward_is_complete = true;
  }

 private:
  std::optional<size_t> written_input() const {
    const auto written =
        std::find_if(writes_.begin(), writes_.end(), [](const WriteCount& one) { return one.moved(); });
    return written == writes_.end() ? std::nullopt : std::optional<size_t>(written - writes_.begin());
  }

  const TorchScriptAsItIs torch_script_;
  std::vector<WriteCount> writes_;  // to the inputs
  std::shared_ptr<Frame> frame_;
  std::optional<ForwardOperators> operators_;
  std::optional<PolicyScope> scope_;
  std::optional<OperatorScope> operator_scope_;
};

CheckpointForward::CheckpointForward(CheckpointOptions options, std::vector<at::Tensor> inputs,
                                     std::function<void(const std::vector<at::Tensor>&)> recompute)
    : impl_(std::make_unique<Impl>(std::move(options), inputs, std::move(recompute))) {}

CheckpointForward::~CheckpointForward() = default;

void CheckpointForward::finish() { impl_->finish(); }

}  // namespace snug::detail
