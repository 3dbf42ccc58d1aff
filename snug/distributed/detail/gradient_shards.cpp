#include "snug/distributed/detail/gradient_shards.h"

#include <ATen/ops/zeros.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/engine.h>

#include "snug/core/error.h"
#include "snug/distributed/detail/shard_state.h"
#include "snug/memory/detail/backward_pass.h"

namespace snug::detail {
namespace {

// Sums on their way at the same time: one travels while backward fills the next.
constexpr size_t kInFlight = 2;

}  // namespace

GradientShards::GradientShards(std::vector<at::Tensor> parameters, std::vector<Own> own,
                               std::shared_ptr<ProcessGroup> group, GradientSharding options)
    : parameters_(std::move(parameters)), own_(std::move(own)), group_(std::move(group)), options_(options) {
  if (options_.bucket.count() < 1) {
    throw ConfigError(
        "ShardedOptimizer: bucket is 0 bytes; give what several parameters take together, such as 25 MiB");
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {  // the frozen ones too: they may be trained one day
    if (has_gradient_hook(parameters_[i])) {
      throw ConfigError(
          fmt::format("ShardedOptimizer: parameter {} has a hook after its gradient already; is there another "
                      "ShardedOptimizer with sharded gradients, or a StepInBackward?",
                      i));
    }
    hooks_.set(parameters_[i], [this, i](const at::Tensor& /*parameter*/) { take_gradient(i); });
  }
}

std::vector<bool> GradientShards::trained_now() const {
  std::vector<bool> now;
  for (const at::Tensor& parameter : parameters_) {
    now.push_back(parameter.requires_grad());
  }
  return now;
}

// In the order in which backward is likely to come to them: from the last to the first.
void GradientShards::make_buckets() {
  buckets_.clear();
  bucket_of_.assign(parameters_.size(), 0);
  int64_t bytes = 0;
  at::Tensor before;
  for (size_t i = parameters_.size(); i-- > 0;) {
    const at::Tensor& parameter = parameters_[i];
    if (!is_trained_[i]) {
      continue;
    }
    const auto size = static_cast<int64_t>(parameter.nbytes());
    if (!before.defined() || bytes + size > options_.bucket.count() || before.dtype() != parameter.dtype() ||
        before.device() != parameter.device()) {
      buckets_.emplace_back();
      bytes = 0;
    }
    bytes += size;
    before = parameter;
    buckets_.back().parameters.push_back(i);
    bucket_of_[i] = buckets_.size() - 1;
  }
}

void GradientShards::take_gradient(size_t parameter) {
  if (const int pass = current_pass(); pass != pass_) {
    begin_pass();
    pass_ = pass;
  }
  --buckets_[bucket_of_[parameter]].missing;
  while (next_ < buckets_.size() && buckets_[next_].missing == 0) {
    send(buckets_[next_++]);
  }
}

// A backward pass inside another goes first. One that ended by an exception has taken its token with it.
void GradientShards::begin_pass() {
  while (!running_.expired() && !sent_.empty()) {
    finish_one();
  }
  sent_.clear();
  if (std::vector<bool> now = trained_now(); now != is_trained_) {
    is_trained_ = std::move(now);
    make_buckets();
  }
  next_ = 0;
  for (Bucket& bucket : buckets_) {
    bucket.missing = bucket.parameters.size();
  }
  const auto token = std::make_shared<int>();
  running_ = token;
  torch::autograd::Engine::get_default_engine().queue_callback([this, token] { end_pass(); });
}

// What took no part is sent too, so that all ranks send the same.
void GradientShards::end_pass() {
  while (next_ < buckets_.size()) {
    send(buckets_[next_++]);
  }
  while (!sent_.empty()) {
    finish_one();
  }
  pass_ = -1;
}

void GradientShards::send(const Bucket& bucket) {
  const at::NoGradGuard no_grad;
  int64_t elements = 0;
  for (const size_t i : bucket.parameters) {
    elements += parameters_[i].numel();
  }
  const at::Tensor sum = at::zeros({elements}, parameters_[bucket.parameters.front()].options().requires_grad(false));
  int64_t at = 0;
  for (const size_t i : bucket.parameters) {
    const at::Tensor& parameter = parameters_[i];
    at::Tensor& gradient = parameter.mutable_grad();
    if (gradient.defined()) {
      if (gradient.is_sparse()) {
        throw ConfigError(fmt::format(
            "ShardedOptimizer: the gradient of parameter {} is sparse, which cannot be cut; build the embedding with "
            "sparse(false)",
            i));
      }
      sum.slice(0, at, at + parameter.numel())
          .copy_(memory_of(laid_out_like(parameter, gradient), 0, parameter.numel()));
      gradient.reset();
    }
    at += parameter.numel();
  }
  if (options_.reduction == Reduction::Mean && group_->size() > 1) {
    sum.div_(group_->size());
  }
  sent_.push_back({&bucket, sum, group_->start_all_reduce(sum)});
  if (sent_.size() > kInFlight) {
    finish_one();
  }
}

void GradientShards::finish_one() {
  const at::NoGradGuard no_grad;
  const Sent sent = std::move(sent_.front());
  sent_.pop_front();
  sent.wait();
  int64_t at = 0;
  for (const size_t i : sent.bucket->parameters) {
    for (const Own& own : own_) {
      if (own.parameter == i) {
        const at::Tensor part = sent.sum.slice(0, at + own.begin, at + own.end);
        at::Tensor& gradient = own.view.mutable_grad();
        if (!gradient.defined()) {
          gradient = at::zeros_like(own.view);
        }
        memory_of(gradient, 0, gradient.numel()).add_(part);
      }
    }
    at += parameters_[i].numel();
  }
}

}  // namespace snug::detail
