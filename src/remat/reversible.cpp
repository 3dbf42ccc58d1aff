#include "snug/extra/reversible.h"

#include <any>
#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/nn/module.h>

#include "snug/core.h"
#include "src/memory/saved_tensor_policy.h"
#include "src/remat/op_tape.h"

// How backward rebuilds the inputs of half-blocks
//
// Problem: backward needs each half-block's input, and the chain keeps only the last streams. Rebuilding an input needs
// the value that the half-block added, which takes a run of the half-block; the gradient needs a run as well.
//
// Choice: the same run serves both. Each half-block is a checkpointed region whose input is not kept as a tensor: the
// chain is the policy that keeps the input, and keeps nothing. The chain keeps the streams' last values and, in
// backward, its position. When half-block i runs again, its tape makes the value that half-block i added, too.
// Subtracting the value gives the streams in front of half-block i: the input of half-block i - 1, and backward asks
// for half-block i - 1 next.
//
// Consequence: each half-block runs once more, not twice.
//
// Owners: the saved tensors of a half-block own its tape and the chain, and the chain owns all tapes. A tape does not
// own the chain.

namespace snug {
namespace {

using detail::OpTape;
using torch::autograd::SavedVariable;
using Streams = std::array<at::Tensor, 2>;

// Half-block i adds to stream i % 2. The half-block reads the other stream and does not change the other stream.
size_t written_by(size_t i) { return i % 2; }
size_t read_by(size_t i) { return 1 - i % 2; }

class Chain : public std::enable_shared_from_this<Chain> {
 public:
  // Runs the newest half-block in forward, and returns the value that the half-block adds. Keeps the streams for
  // backward passes inside the half-block.
  at::Tensor run(const detail::ReversibleHalf& half, const std::string& name, const Streams& streams);

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
    while (*at_ > i + 1) {
      const size_t last = *at_ - 1;
      const at::Tensor added = halves_[last].tape->look_at(halves_[last].added);
      streams_[written_by(last)] = streams_[written_by(last)] - added;
      at_ = last;
    }
    const at::Tensor input = streams_[read_by(i)];
    if (i == 0 && !last_.empty()) {
      give_up();  // backward is complete
    }
    return input;
  }

 private:
  struct Half {
    std::shared_ptr<OpTape> tape;
    std::any added = {};  // packed by the tape
  };

  void move_to(size_t at, const Streams& streams) {
    at_ = at;
    streams_ = {streams[0].detach(), streams[1].detach()};
  }

  void give_up() {
    at_.reset();
    streams_ = {};
  }

  void start_from_the_end() {
    if (last_.empty()) {
      throw Error(
          "ReversibleSequential: a backward pass inside its forward wants a half-block whose input was given up; "
          "go backward after the forward");
    }
    move_to(halves_.size(), {last_[0].unpack(), last_[1].unpack()});
  }

  friend class SavedOfHalf;
  std::recursive_mutex mutex_;
  std::vector<Half> halves_;
  std::vector<SavedVariable> last_;  // the streams after the last half-block
  std::optional<size_t> at_;         // streams_ are the streams in front of this half-block
  Streams streams_;
};

// Keeps a half-block's input: as the half-block's number.
class RebuiltInput final : public detail::SavedTensorPolicy {
 public:
  RebuiltInput(std::weak_ptr<Chain> chain, size_t index) : chain_(std::move(chain)), index_(index) {}
  std::any pack(const at::Tensor&) override { return index_; }
  at::Tensor unpack(std::any&) override { return chain_.lock()->input_of(index_); }

 private:
  std::weak_ptr<Chain> chain_;
  size_t index_;
};

// Passes the tensors saved by a half-block to the half-block's tape. The chain's mutex is locked before a tape's.
class SavedOfHalf final : public detail::SavedTensorPolicy {
 public:
  SavedOfHalf(std::shared_ptr<Chain> chain, std::shared_ptr<OpTape> tape)
      : chain_(std::move(chain)), tape_(std::move(tape)) {}
  std::any pack(const at::Tensor& tensor) override { return tape_->pack(tensor); }
  at::Tensor unpack(std::any& packed) override {
    const std::lock_guard lock(chain_->mutex_);
    return tape_->unpack(packed);
  }
  bool gives_away(std::any& packed, const at::Tensor& unpacked) override { return tape_->gives_away(packed, unpacked); }

 private:
  std::shared_ptr<Chain> chain_;
  std::shared_ptr<OpTape> tape_;
};

at::Tensor Chain::run(const detail::ReversibleHalf& half, const std::string& name, const Streams& streams) {
  const size_t i = halves_.size();
  const auto tape = std::make_shared<OpTape>(
      detail::TapeRegion{.name = "ReversibleSequential: " + name, .outside = detail::current_policy()});
  {
    const std::lock_guard lock(mutex_);
    halves_.push_back({tape});
    move_to(i, streams);
  }
  const at::Tensor& x = streams[read_by(i)];
  const uint32_t version = static_cast<uint32_t>(x._version());
  at::Tensor added;
  {
    const detail::PolicyScope saved(std::make_shared<SavedOfHalf>(shared_from_this(), tape));
    const detail::OperatorScope operators(*tape);
    tape->keep_outside(x, std::make_shared<RebuiltInput>(weak_from_this(), i));
    added = half.function(x);
    if (i > 0) {  // nobody asks for the streams in front of the chain
      halves_[i].added = tape->pack_result(added);
    }
  }
  tape->close();
  if (static_cast<uint32_t>(x._version()) != version) {
    throw ConfigError(fmt::format(
        "ReversibleSequential: {} writes its input in place, from which backward computes the streams; write out of place",
        name));
  }
  return added;
}

// `chain` is null if no backward will come.
Streams run(const std::vector<detail::ReversibleHalf>& halves, Streams streams, const std::shared_ptr<Chain>& chain) {
  for (at::Tensor& stream : streams) {
    if (chain != nullptr && stream.is_view()) {
      stream = stream.clone();  // the memory of the other stream, or of more, is not the chain's
    }
  }
  for (size_t i = 0; i < halves.size(); ++i) {
    at::Tensor& stream = streams[written_by(i)];
    const std::string name = fmt::format("{} of block {}", i % 2 == 0 ? "F" : "G", i / 2);
    const at::Tensor added =
        chain == nullptr ? halves[i].function(streams[read_by(i)]) : chain->run(halves[i], name, streams);
    if (added.sizes() != stream.sizes()) {
      throw ConfigError(fmt::format("ReversibleSequential: {} made [{}] of [{}]; it must keep the shape", name,
                                    fmt::join(added.sizes(), ", "), fmt::join(stream.sizes(), ", ")));
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

ReversibleSequential::ReversibleSequential(int64_t dim)
    : dim_(dim), module_(std::make_shared<torch::nn::Module>("ReversibleSequential")) {}

void ReversibleSequential::add(detail::ReversibleHalf f, detail::ReversibleHalf g) {
  const std::string index = std::to_string(halves_.size() / 2);
  const auto block = std::make_shared<torch::nn::Module>("ReversibleBlock");
  for (auto [name, half] : {std::pair("f", &f), std::pair("g", &g)}) {
    if (half->module == nullptr) {
      continue;
    }
    block->register_module(name, half->module);
  }
  module_->register_module(index, block);
  halves_.push_back(std::move(f));
  halves_.push_back(std::move(g));
}

at::Tensor ReversibleSequential::forward(const at::Tensor& x) const {
  check(halves_);
  if (dim_ < -x.dim() || dim_ >= x.dim() || x.size(dim_) % 2 != 0) {
    throw ConfigError(
        fmt::format("ReversibleSequential: [{}] cannot be halved along dimension {}; give an even size there",
                    fmt::join(x.sizes(), ", "), dim_));
  }
  const auto halve = [&](const at::Tensor& both) {
    const auto parts = both.chunk(2, dim_);
    return Streams{parts.at(0), parts.at(1)};
  };
  const auto chain = new_chain();
  const at::Tensor y = at::cat(run(halves_, halve(x), chain), dim_);
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
  const Streams streams = run(halves_, {std::move(a), std::move(b)}, chain);
  if (chain != nullptr) {
    chain->finish(streams);
  }
  return {streams[0], streams[1]};
}

}  // namespace snug
