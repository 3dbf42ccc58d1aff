#include "src/distributed/gradient_shards.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <numeric>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include "snug/core.h"
#include "src/distributed/process_group_impl.h"
#include "src/distributed/shard_state.h"
#include "src/memory/operator_mode.h"

namespace snug::detail {
namespace {

using SteadyClock = std::chrono::steady_clock;

double seconds_since(SteadyClock::time_point begin) {
  return std::chrono::duration<double>(SteadyClock::now() - begin).count();
}

}  // namespace

GradientShards::GradientShards(ProcessGroup& group, int group_size, std::vector<at::Tensor> parameters,
                               std::vector<int> owners, int64_t at_once)
    : group_(group),
      group_size_(group_size),
      parameters_(std::move(parameters)),
      owners_(std::move(owners)),
      at_once_(at_once),
      order_(parameters_.size()),
      is_ready_(parameters_.size()),
      has_gradient_(parameters_.size()) {
  std::iota(order_.rbegin(), order_.rend(), size_t{0});
}

GradientShards::~GradientShards() { forget_sent(); }

// After a pass that has failed.
void GradientShards::forget_sent() {
  if (!on_their_way_.empty()) {
    group_.impl().busy->end();
    on_their_way_.clear();
  }
  bytes_on_their_way_ = 0;
}

void GradientShards::take_order() {
  if (!std::exchange(takes_order_, false)) {
    return;
  }
  has_order_ = true;
  std::vector<int64_t> order(order_.size());
  if (group_.rank() == 0) {
    std::vector<bool> is_in(order_.size());
    for (const size_t index : completed_) {
      is_in[index] = true;
    }
    std::ranges::copy_if(order_, std::back_inserter(completed_), [&](size_t index) { return !is_in[index]; });
    std::ranges::copy(completed_, order.begin());
  }
  all_reduce(group_, order);
  std::ranges::copy(order, order_.begin());
}

void GradientShards::begin(const std::vector<bool>& is_used, int divisor) {
  divisor_ = divisor;
  next_ = 0;
  completed_.clear();
  forget_sent();
  keeps_nothing_ = false;
  std::ranges::fill(has_gradient_, uint8_t{0});
  for (size_t i = 0; i < is_used.size(); ++i) {
    is_ready_[i] = is_used[i] ? 0 : 1;
  }
}

void GradientShards::complete(size_t index, size_t references) {
  if (std::exchange(is_ready_[index], uint8_t{1}) != 0) {
    throw ConfigError(
        "DataParallel: a backward pass came twice to a parameter, or to a parameter outside of the pass's graph, as "
        "nested backward passes do; gradients in shards are sent once: leave the nested pass out, or use shard = None");
  }
  completed_.push_back(index);
  completing_ = index;
  references_ = references;
  start_ready();
  references_ = 0;
}

void GradientShards::start_ready() {
  for (; next_ < order_.size() && is_ready_[order_[next_]] != 0; ++next_) {
    start(order_[next_]);
  }
}

// The ranks whose values an owner of this group adds, in order: the owner in the group before, for the sum of all
// groups before, and the ranks of this group.
std::vector<int> GradientShards::addends() const {
  std::vector<int> ranks;
  if (number_ > 0) {
    ranks.push_back(group_.rank() - group_size_);
  }
  for (int i = 0; i < group_size_; ++i) {
    ranks.push_back(number_ * group_size_ + i);
  }
  return ranks;
}

// All but the last group hand on the sum so far, and all but the last but one the whole sum.
int64_t GradientShards::bytes_to_send(size_t index) const {
  const int sums = groups_ == 1 ? 0 : (number_ + 1 != groups_ ? 1 : 0) + (number_ + 2 != groups_ ? 1 : 0);
  return (is_own(index) ? sums : 1) * static_cast<int64_t>(parameters_[index].nbytes());
}

int64_t GradientShards::bytes_of_pass() const {
  int64_t bytes = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    bytes += bytes_to_send(i);
  }
  return bytes;
}

c10::intrusive_ptr<c10d::Work> GradientShards::send(const at::Tensor& part, int to, size_t index) {
  return group_.impl().named("send",
                             [&] { return start_send(*group_.impl().backend, part, to, static_cast<int>(index)); });
}

c10::intrusive_ptr<c10d::Work> GradientShards::receive_from(int rank, const at::Tensor& part, size_t index) {
  return group_.impl().named(
      "receive", [&] { return start_receive(*group_.impl().backend, part, rank, static_cast<int>(index)); });
}

// All memory is allocated before the first element is sent.
//
// A rank that waits for room inside backward must not wait for a rank that waits for an operation of the model, such as
// SyncBatchNorm's. So the owners of a parameter in all groups count the same bytes, although the first group's owner
// receives a part less: owners wait for room at the same parameter.
void GradientShards::start(size_t index) {
  const at::NoGradGuard no_grad;
  const at::Tensor& parameter = parameters_[index];
  if (parameter.grad().defined()) {
    report_coming_write(parameter.grad());
  }
  const UnseenOperators unseen;
  const bool is_dense = parameter.is_non_overlapping_and_dense();
  const std::vector<int> ranks = addends();
  Sent sent{.index = index};
  const at::Tensor own = keeps_nothing_ ? at::Tensor() : parameter.grad();
  has_gradient_[index] = own.defined() ? 1 : 0;
  if (own.defined()) {
    sent.gradient = is_dense ? laid_out_like(parameter, own.detach()) : own.detach().contiguous();
    // Another gradient may be on the same memory, and must keep its value.
    const size_t references = 2 + (index == completing_ ? references_ : 0);
    if (sent.gradient.storage().is_alias_of(own.storage()) && own.storage().use_count() > references) {
      sent.gradient = sent.gradient.clone();
    }
  } else {
    sent.gradient = is_dense ? at::empty_strided(parameter.sizes(), parameter.strides(), parameter.options()).zero_()
                             : at::zeros(parameter.sizes(), parameter.options());
  }
  const int64_t elements = sent.gradient.numel();
  sent.flat = is_dense ? memory_of(sent.gradient, 0, elements) : sent.gradient.view({elements});
  const auto of_element = static_cast<int64_t>(sent.flat.element_size());
  const int most = group_size_ - (groups_ > 1 ? 0 : 1);  // parts that an owner of any group receives
  sent.chunk = std::clamp(at_once_ / of_element / std::max(1, most), int64_t{1},
                          std::max<int64_t>(1, elements));  // the same on all ranks
  sent.bytes = (elements + (is_own(index) ? most : 0) * sent.chunk) * of_element;
  while (!on_their_way_.empty() && bytes_on_their_way_ + sent.bytes > at_once_) {
    finish_first();
  }
  for (size_t i = 1; i < ranks.size() && is_own(index); ++i) {
    sent.arrived.push_back(at::empty({sent.chunk}, sent.flat.options()));
  }
  if (divisor_ > 1) {
    sent.flat.div_(divisor_);
  }
  parameter.mutable_grad().reset();
  if (elements > 0 && is_own(index)) {
    receive(sent, 0);
  } else if (elements > 0) {
    for (int64_t begin = 0; begin < elements; begin += sent.chunk) {
      const at::Tensor part = sent.flat.narrow(0, begin, std::min(sent.chunk, elements - begin));
      sent.works.push_back(send(part, number_ * group_size_ + owners_[index], index));
    }
  }
  bytes_sent_ += bytes_to_send(index);
  bytes_on_their_way_ += sent.bytes;
  if (on_their_way_.empty()) {
    group_.impl().busy->begin();
  }
  on_their_way_.push_back(std::move(sent));
}

// Receives a chunk of each other rank's values.
void GradientShards::receive(Sent& sent, int64_t begin) {
  const int64_t count = std::min(sent.chunk, sent.flat.numel() - begin);
  sent.works.clear();
  size_t next = 0;
  for (const int rank : addends()) {
    if (rank != group_.rank()) {
      sent.works.push_back(receive_from(rank, sent.arrived[next++].narrow(0, 0, count), sent.index));
    }
  }
}

// The sum in the order of ranks.
void GradientShards::add_up(Sent& sent) {
  const int64_t elements = sent.flat.numel();
  for (int64_t begin = 0; begin < elements; begin += sent.chunk) {
    if (begin > 0) {
      receive(sent, begin);
    }
    const int64_t count = std::min(sent.chunk, elements - begin);
    const at::Tensor own = sent.flat.narrow(0, begin, count);
    at::Tensor sum;
    size_t next = 0;
    for (const int rank : addends()) {
      at::Tensor part = own;
      if (rank != group_.rank()) {
        group_.impl().named("receive", [&] { sent.works[next]->wait(); });
        part = sent.arrived[next++].narrow(0, 0, count);
      }
      sum.defined() ? static_cast<void>(sum.add_(part)) : static_cast<void>(sum = part);
    }
    send_round(sum, own, sent.index);
  }
}

// `own` gets the sum of all groups. `sum`: of this group and the groups before; it may be `own`.
void GradientShards::send_round(const at::Tensor& sum, const at::Tensor& own, size_t index) {
  const int next = (group_.rank() + group_size_) % group_.size();
  const int before = (group_.rank() + group_.size() - group_size_) % group_.size();
  const auto wait = [&](const auto& work) { group_.impl().named("add up", [&] { work->wait(); }); };
  if (number_ + 1 < groups_) {
    wait(send(sum, next, index));
    wait(receive_from(before, own, index));
  } else if (!sum.is_same(own)) {
    own.copy_(sum);
  }
  if (groups_ > 1 && number_ + 2 != groups_) {
    wait(send(own, next, index));
  }
}

void GradientShards::finish_first() {
  const at::NoGradGuard no_grad;
  const auto begin = SteadyClock::now();
  Sent& sent = on_their_way_.front();
  const at::Tensor& parameter = parameters_[sent.index];
  if (is_own(sent.index)) {
    {
      const UnseenOperators unseen;
      add_up(sent);
    }
    if (!keeps_nothing_) {
      parameter.mutable_grad() = sent.gradient;
      report_unseen_write(sent.gradient);
    }
  } else {
    for (const auto& work : sent.works) {
      group_.impl().named("send", [&] { work->wait(); });
    }
  }
  bytes_on_their_way_ -= sent.bytes;
  on_their_way_.pop_front();
  if (on_their_way_.empty()) {
    group_.impl().busy->end();
  }
  waited_ += seconds_since(begin);
}

void GradientShards::finish(bool may_be_unused, bool counts_all) {
  end_pass(may_be_unused, counts_all);
  takes_order_ = !has_order_;
}

void GradientShards::finish_with_zeros(bool may_be_unused) {
  keeps_nothing_ = true;
  end_pass(may_be_unused, /*counts_all=*/false);
}

void GradientShards::end_pass(bool may_be_unused, bool counts_all) {
  std::ranges::fill(is_ready_, uint8_t{1});
  start_ready();
  if (counts_all) {
    std::ranges::fill(has_gradient_, uint8_t{1});
  }
  while (!on_their_way_.empty()) {
    finish_first();
  }
  if (may_be_unused) {
    std::vector<int64_t> used(has_gradient_.begin(), has_gradient_.end());
    all_reduce(group_, used);
    for (size_t i = 0; i < used.size(); ++i) {
      if (used[i] == 0) {
        parameters_[i].mutable_grad().reset();
      }
    }
  }
}

}  // namespace snug::detail
