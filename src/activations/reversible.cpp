#include "snug/extra/reversible.h"

#include <array>
#include <mutex>
#include <optional>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/nn/module.h>

#include "snug/checkpoint.h"
#include "snug/core.h"
#include "src/activations/region_draws.h"
#include "src/activations/region_operators.h"
#include "src/activations/training_modes.h"
#include "src/memory/saved_tensor_policy.h"
#include "src/precision/autocast_state.h"

// How backward rebuilds the inputs of half-blocks
//
// Problem: backward needs each half-block's input, and the chain keeps only the last streams. Rebuilding an input needs
// the value that the half-block added, which takes a run of the half-block; the gradient needs a run as well.
//
// Choice: the same run serves both. Each half-block is a checkpoint() whose saved input is not a tensor but a number,
// the half-block's index in the chain. The chain keeps the streams' last values and, in backward, its position. The
// recomputation of half-block i gives the value that half-block i added. Subtracting the value gives the streams in
// front of half-block i: the input of half-block i - 1, and backward asks for half-block i - 1 next.
//
// Consequence: each half-block runs once more, not twice.

namespace snug {
namespace {

using torch::autograd::SavedVariable;
using Streams = std::array<at::Tensor, 2>;
using Function = std::function<at::Tensor(at::Tensor)>;

// Half-block i adds to stream i % 2. The half-block reads the other stream and does not change the other stream.
size_t written_by(size_t i) { return i % 2; }
size_t read_by(size_t i) { return 1 - i % 2; }

// A half-block, and the state in which it ran.
struct Half {
  Function function;
  detail::TrainingModes modes;
  detail::AutocastState autocast = detail::AutocastState::capture();
  std::shared_ptr<detail::RegionDraws> draws;  // null: the recomputation draws other numbers
  bool has_run = false;

  at::Tensor first(const at::Tensor& x) const {
    if (draws == nullptr) {
      return function(x);
    }
    detail::ForwardDraws noted(*draws);
    const detail::OperatorScope scope(noted);
    at::Tensor result = function(x);
    noted.note_if_moved();
    return result;
  }

  at::Tensor again(const at::Tensor& x) const {
    const detail::AutocastStateScope autocast_scope(autocast);
    if (draws == nullptr) {
      return function(x);
    }
    detail::RecomputeDraws same(*draws);
    const detail::OperatorScope scope(same);
    return function(x);
  }

  // Runs the half-block without checkpoint(). As in a checkpoint(), memory that existed before is not written again.
  at::Tensor again_on_copies(const at::Tensor& x) const {
    const detail::RegionOperators nothing_known;
    detail::RecomputeOperators on_copies(nothing_known);
    const detail::OperatorScope operator_scope(on_copies);
    const detail::TrainingModes::Scope mode_scope(modes);
    return again(x);
  }
};

class Chain {
 public:
  // Called in forward, before the newest half-block. Keeps the streams for backward passes inside the half-block.
  void begin(Half half, const Streams& streams) {
    const std::lock_guard lock(mutex_);
    halves_.push_back(std::move(half));
    move_to(halves_.size() - 1, streams);
  }

  // The function that checkpoint() calls: first in forward, then in recomputations.
  at::Tensor run(size_t i, const at::Tensor& x) {
    if (!std::exchange(halves_[i].has_run, true)) {
      return halves_[i].first(x);
    }
    const at::Tensor result = halves_[i].again(x);
    ran_again(i, result);
    return result;
  }

  // Keeps detached streams: the graph of the streams owns the chain, so a chain that owned the graph would never die.
  void finish(const Streams& streams) {
    const std::lock_guard lock(mutex_);
    for (const at::Tensor& stream : streams) {
      last_.emplace_back(stream.detach(), /*is_output=*/false);
    }
    give_up();
  }

  at::Tensor input_of(size_t i) {
    const std::lock_guard lock(mutex_);
    if (!at_ || *at_ < i) {
      start_from_the_end();
    }
    const at::NoGradGuard no_grad;
    if (added_.defined()) {
      take_back(*at_ - 1, std::exchange(added_, at::Tensor()));
    }
    while (*at_ > i + 1) {  // half-blocks that backward asked nothing of
      const size_t last = *at_ - 1;
      take_back(last, halves_[last].again_on_copies(streams_[read_by(last)]));
    }
    return streams_[read_by(i)];
  }

 private:
  void move_to(size_t at, const Streams& streams) {
    at_ = at;
    added_.reset();
    streams_ = {streams[0].detach(), streams[1].detach()};
  }

  void start_from_the_end() {
    if (last_.empty()) {
      throw Error(
          "ReversibleSequential: a backward pass inside its forward wants a half-block whose input was given up; "
          "go backward after the forward");
    }
    move_to(halves_.size(), {last_[0].unpack(), last_[1].unpack()});
  }

  // The result is only noted here, and subtracted when backward asks for the next input: inside checkpoint()'s
  // recomputation the chain may run no operators of its own.
  void ran_again(size_t i, const at::Tensor& result) {
    const std::lock_guard lock(mutex_);
    if (at_ != i + 1) {
      return;
    }
    if (i == 0 && !last_.empty()) {
      give_up();  // backward is complete
    } else {
      added_ = result.tensor_data();
    }
  }

  void take_back(size_t i, const at::Tensor& added) {
    streams_[written_by(i)] = streams_[written_by(i)] - added;
    at_ = i;
  }

  void give_up() {
    at_.reset();
    added_.reset();
    streams_ = {};
  }

  std::recursive_mutex mutex_;
  std::vector<Half> halves_;
  std::vector<SavedVariable> last_;  // the streams after the last half-block
  std::optional<size_t> at_;         // streams_ are the streams in front of this half-block
  Streams streams_;
  at::Tensor added_;  // the value that half-block *at_ - 1 added, if the half-block has run again
};

// checkpoint() saves a half-block's input. This policy packs the input as the half-block's number.
class RebuiltInput final : public detail::SavedTensorPolicy {
 public:
  RebuiltInput(std::shared_ptr<Chain> chain, size_t index) : chain_(std::move(chain)), index_(index) {}
  std::any pack(const at::Tensor&) override { return index_; }
  at::Tensor unpack(std::any&) override { return chain_->input_of(index_); }

 private:
  std::shared_ptr<Chain> chain_;
  size_t index_;
};

// `chain` is null if no backward will come.
Streams run(const std::vector<detail::ReversibleHalf>& halves, Streams streams, const std::shared_ptr<Chain>& chain,
            const ReversibleOptions& options) {
  for (size_t i = 0; i < halves.size(); ++i) {
    const at::Tensor& x = streams[read_by(i)];
    at::Tensor& stream = streams[written_by(i)];
    at::Tensor added;
    if (chain == nullptr) {
      added = halves[i].function(x);
    } else {
      chain->begin(
          {.function = halves[i].function,
           .modes = detail::TrainingModes(halves[i].module),
           .draws = options.preserve_rng_state ? std::make_shared<detail::RegionDraws>(options.draws_unseen) : nullptr},
          streams);
      const detail::PolicyScope scope(std::make_shared<RebuiltInput>(chain, i));
      added = checkpoint(
          {.preserve_rng_state = false,
           .early_stop = false,  // the chain needs the result
           .label = fmt::format("{} of reversible block {}", i % 2 == 0 ? "F" : "G", i / 2),
           .module = halves[i].module},
          [chain, i](const at::Tensor& t) { return chain->run(i, t); }, x);
    }
    if (added.sizes() != stream.sizes()) {
      throw ConfigError(fmt::format("ReversibleSequential: {} of block {} made [{}] of [{}]; it must keep the shape",
                                    i % 2 == 0 ? "F" : "G", i / 2, fmt::join(added.sizes(), ", "),
                                    fmt::join(x.sizes(), ", ")));
    }
    stream = stream + added;
  }
  return streams;
}

std::shared_ptr<Chain> new_chain() { return at::GradMode::is_enabled() ? std::make_shared<Chain>() : nullptr; }

void check(const std::vector<detail::ReversibleHalf>& halves) {
  if (halves.empty()) {
    throw ConfigError("ReversibleSequential: there are no blocks; add some with push_back");
  }
}

}  // namespace

ReversibleSequential::ReversibleSequential(ReversibleOptions options)
    : options_(options), module_(std::make_shared<torch::nn::Module>("ReversibleSequential")) {
  if (options_.draws_unseen && !options_.preserve_rng_state) {
    throw ConfigError(
        "ReversibleSequential: draws_unseen repeats random numbers, which preserve_rng_state = false forbids");
  }
}

void ReversibleSequential::add(detail::ReversibleHalf f, detail::ReversibleHalf g) {
  const std::string index = std::to_string(halves_.size() / 2);
  const auto block = std::make_shared<torch::nn::Module>("ReversibleBlock");
  for (auto [name, half] : {std::pair("f", &f), std::pair("g", &g)}) {
    if (half->module == nullptr) {
      continue;
    }
    for (const auto& buffer : half->module->named_buffers()) {
      if (buffer.key().ends_with("running_mean") && buffer.value().defined()) {
        throw ConfigError(fmt::format(
            "ReversibleSequential: {}.{} has running statistics ({}), which its recomputation would move once more; "
            "replace the BatchNorm with GroupNorm or LayerNorm",
            index, name, buffer.key()));
      }
    }
    block->register_module(name, half->module);
  }
  module_->register_module(index, block);
  halves_.push_back(std::move(f));
  halves_.push_back(std::move(g));
}

at::Tensor ReversibleSequential::forward(const at::Tensor& x) const {
  check(halves_);
  if (options_.dim < -x.dim() || options_.dim >= x.dim() || x.size(options_.dim) % 2 != 0) {
    throw ConfigError(
        fmt::format("ReversibleSequential: [{}] cannot be halved along dimension {}; give an even size there",
                    fmt::join(x.sizes(), ", "), options_.dim));
  }
  const auto halve = [&](const at::Tensor& both) {
    const auto parts = both.chunk(2, options_.dim);
    return Streams{parts.at(0), parts.at(1)};
  };
  const auto chain = new_chain();
  const at::Tensor y = at::cat(run(halves_, halve(x), chain, options_), options_.dim);
  if (chain != nullptr) {
    chain->finish(halve(y.detach()));  // views of memory that the caller has anyway
  }
  return y;
}

std::pair<at::Tensor, at::Tensor> ReversibleSequential::forward(at::Tensor a, at::Tensor b) const {
  check(halves_);
  if (a.sizes() != b.sizes()) {
    throw ConfigError(fmt::format("ReversibleSequential: the streams are [{}] and [{}]; give two of one shape",
                                  fmt::join(a.sizes(), ", "), fmt::join(b.sizes(), ", ")));
  }
  const auto chain = new_chain();
  const Streams streams = run(halves_, {std::move(a), std::move(b)}, chain, options_);
  if (chain != nullptr) {
    chain->finish(streams);
  }
  return {streams[0], streams[1]};
}

}  // namespace snug
