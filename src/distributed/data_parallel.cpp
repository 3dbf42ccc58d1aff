#include "snug/distributed/data_parallel.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <map>
#include <unordered_set>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/utils/tensor_flatten.h>
#include <torch/version.h>

#include "snug/clip.h"
#include "snug/core.h"
#include "snug/distributed/sharded_optimizer.h"
#include "src/core/file_memory.h"
#include "src/core/gradient_hooks.h"
#include "src/distributed/data_parallel_impl.h"
#include "src/distributed/process_group_impl.h"
#include "src/distributed/ranked_step.h"
#include "src/distributed/replicas.h"
#include "src/distributed/same_model.h"
#include "src/memory/backward_pass.h"
#include "src/optim/clip_over_ranks.h"

// How DataParallel stands on c10d's Reducer
//
// Problem: gradients must be summed over the ranks while backward still computes, in the same order on every rank, and
// a mistake of the program must become an error instead of a rank that waits for ever.
// Options: sum all gradients after backward; write new code for buckets and their order; or use c10d's Reducer, as
// Python's DistributedDataParallel does. The first hides no communication. The second repeats hard work.
// Choice: the Reducer gathers gradients into buckets and calls a hook for each full bucket. This file adds the rules
// for backward passes. The outputs of forward() carry a hook that notes the id of the backward pass in which the hook
// runs; parameters carry a hook that compares the id. Both hooks run before the Reducer's own hooks.
// Consequences:
// - A Reducer has fixed parameters, so a new Reducer is made if other parameters are frozen.
// - From LibTorch 2.15 on a bucket exists only from the bucket's first gradient to the end of backward; after backward
//   the bucket's memory lives as long as one of the gradients in the bucket.
// - The Reducer keeps all gradients in buckets. With shards, GradientShards takes the Reducer's
//   place. WeightShards is added if the weights are in shards, too.
// - The Reducer is an internal class of LibTorch. Tried on LibTorch 2.11.0, 2.13.0 and 2.15.0.

#define SNUG_LAZY_BUCKETS (TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15)

namespace snug {
namespace {

constexpr bool kHasLazyBuckets = SNUG_LAZY_BUCKETS;

constexpr int64_t kFirstBucket = 1 << 20;  // as in Python

// Buckets in the order in which backward probably reaches the parameters: from the last to the first.
std::vector<std::vector<size_t>> first_buckets(const std::vector<at::Tensor>& parameters, int64_t cap) {
  const auto first = static_cast<size_t>(std::min(kFirstBucket, cap));
  auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(parameters, {first, static_cast<size_t>(cap)}));
  std::reverse(buckets.begin(), buckets.end());
  return buckets;
}

void check_can_be_sent(const char* kind, const std::string& name, const at::Tensor& tensor) {
  if (!detail::can_be_sent(tensor)) {
    throw ConfigError(fmt::format(
        "DataParallel: {} '{}' is a {}, which ranks cannot send; make it a dense tensor, or keep it outside "
        "of the model",
        kind, name, tensor.toString()));
  }
}

// All memory is allocated before the first buffer is sent: if a rank ran out of memory between two buffers, the other
// ranks would wait for the rank at the second buffer.
void send_buffers(ProcessGroup& group, const DataParallel::NamedTensors& buffers, bool takes_them) {
  const at::NoGradGuard no_grad;
  std::vector<std::vector<at::Tensor>> alike;  // buffers of the same type and device
  for (const auto& [name, buffer] : buffers) {
    const at::Tensor sent = detail::as_sent(buffer);
    const auto found = std::find_if(alike.begin(), alike.end(), [&](const auto& some) {
      return some[0].scalar_type() == sent.scalar_type() && some[0].device() == sent.device();
    });
    (found != alike.end() ? *found : alike.emplace_back()).push_back(sent);
  }
  std::vector<at::Tensor> flat;
  for (const auto& some : alike) {
    flat.push_back(torch::utils::flatten_dense_tensors(some));
    for (size_t i = 0; takes_them && i < some.size(); ++i) {
      detail::report_coming_write(some[i]);  // a journal copies the buffers
    }
  }
  group.broadcast(flat);
  for (size_t i = 0; takes_them && i < alike.size(); ++i) {
    const auto received = torch::utils::unflatten_dense_tensors(flat[i], alike[i]);
    for (size_t j = 0; j < received.size(); ++j) {
      alike[i][j].copy_(received[j]);
    }
  }
}

// Owners, and the bytes that ranks send each other, rest on the memory of parameters. One line for each parameter.
std::string layouts_of(const DataParallel::NamedTensors& parameters) {
  std::string text;
  std::map<const void*, size_t> numbers;  // of storages
  for (const auto& [name, tensor] : parameters) {
    if (tensor.layout() == at::kStrided) {
      const auto number = numbers.emplace(tensor.storage().unsafeGetStorageImpl(), numbers.size()).first->second;
      text +=
          fmt::format("\nparameter '{}' with strides [{}] at element {} of memory {}, which has {} bytes", name,
                      fmt::join(tensor.strides(), ", "), tensor.storage_offset(), number, tensor.storage().nbytes());
    }
  }
  return text;
}

}  // namespace

// Starts the communication of a bucket, and ends the communication when the Reducer asks for the result. The Reducer
// asks at the end of backward, in the order of the buckets.
class DataParallel::Impl::Hook final : public c10d::CommHookInterface {
 public:
  explicit Hook(Impl& parent) : parent_(parent) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::IntType::get());
    future->markCompleted(static_cast<int64_t>(start(bucket.getBufferRef(), bucket.getParameters())));
    return future;
  }

  /// Returns the number of the bucket in this pass.
  size_t start(const at::Tensor& gradients, const std::vector<at::Tensor>& parameters) {
    ProcessGroup& group = *parent_.group_;
    const int64_t before = group.traffic().all_reduce;
    if (launched_ == 0) {
      busy_before_ = group.impl().busy->seconds();
    }
    if (const int divisor = parent_.divides() ? group.size() : 1; divisor > 1) {
      gradients.div_(divisor);
    }
    // All buckets of a pass are started before the first bucket is ended. The Reducer's own index is not right with
    // static_graph.
    const size_t index = launched_;
    const CommHook& hook = parent_.options_.hook;
    auto wait = hook ? hook(GradientBucket{index, gradients, parameters}, group) : group.start_all_reduce(gradients);
    started_[index] = {gradients, parameters, std::move(wait)};
    ++launched_;  // a hook that failed has sent nothing: send_zeros() must call the hook again
    parent_.bytes_reduced_ += group.traffic().all_reduce - before;
    return index;
  }

  at::Tensor parseHookResult(const c10::IValue& result) override { return finish(static_cast<size_t>(result.toInt())); }

  /// Begins a new pass.
  void reset() {
    launched_ = 0;
    started_.clear();
  }
  size_t launched() const { return launched_; }
  void finish_all() {
    while (!started_.empty()) {
      finish(started_.begin()->first);
    }
  }

 private:
  struct Started {
    at::Tensor gradients = {};
    std::vector<at::Tensor> parameters = {};
    std::function<void()> wait = {};
  };

  at::Tensor finish(size_t index) {
    ProcessGroup& group = *parent_.group_;
    const int64_t before = group.traffic().all_reduce;
    const auto begin = std::chrono::steady_clock::now();
    const Started started = started_.extract(index).mapped();
    started.wait();
    if (parent_.options_.reduction == Reduction::Sum && parent_.options_.find_unused_parameters &&
        !parent_.options_.gradient_as_bucket_view) {
      give_sums_back(started.gradients, started.parameters);
    }
    parent_.time_.waited += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    parent_.bytes_reduced_ += group.traffic().all_reduce - before;
    if (started_.empty()) {
      parent_.time_.total += group.impl().busy->seconds() - busy_before_;
      if (std::isnan(parent_.time_.total)) {
        parent_.time_.waited = parent_.time_.total;  // the device waits, not the thread
      }
    }
    return started.gradients;
  }

  // The Reducer leaves out a parameter that no rank used. For a parameter of this kind, rank 0 alone has kept the sum
  // of an earlier pass, so the sum is copied into the gradients here.
  static void give_sums_back(const at::Tensor& gradients, const std::vector<at::Tensor>& parameters) {
    int64_t begin = 0;
    for (const at::Tensor& parameter : parameters) {
      const at::Tensor sum = gradients.narrow(0, begin, parameter.numel());
      if (const at::Tensor& gradient = parameter.grad(); gradient.defined()) {
        const bool has_its_strides = parameter.is_non_overlapping_and_dense();
        gradient.detach().copy_(has_its_strides
                                    ? sum.as_strided(parameter.sizes(), parameter.strides(), sum.storage_offset())
                                    : sum.view(parameter.sizes()));
      }
      begin += parameter.numel();
    }
  }

  Impl& parent_;
  size_t launched_ = 0;                // in this pass
  std::map<size_t, Started> started_;  // not ended yet
  double busy_before_ = 0;
};

DataParallel::Impl::Impl(const NamedTensors& parameters, const NamedTensors& buffers,
                         std::shared_ptr<ProcessGroup> group, DataParallelOptions options)
    : group_(std::move(group)), options_(std::move(options)), buffers_(buffers) {
  if (group_ == nullptr) {
    throw ConfigError("DataParallel: the process group is null; give what init_process_group() returned");
  }
  detail::check_same_model(
      *group_,
      fmt::format("options bucket = {}, gradient_as_bucket_view = {}, find_unused_parameters = {}, static_graph = {}, "
                  "reduction = {}, broadcast_buffers = {}, a hook = {}, shard = {}, shard_group = {}",
                  options_.bucket.count(), options_.gradient_as_bucket_view, options_.find_unused_parameters,
                  options_.static_graph, options_.reduction == Reduction::Mean ? "Mean" : "Sum",
                  options_.broadcast_buffers, options_.hook != nullptr, static_cast<int>(options_.shard),
                  options_.shard_group) +
          (options_.shard != Shard::None ? layouts_of(parameters) : ""),
      parameters, buffers);
  std::vector<at::Tensor> sent;
  std::unordered_set<const c10::TensorImpl*> seen;
  bool is_any_trained = false;
  for (const auto& [name, tensor] : parameters) {
    if (!group_->impl().connects(tensor.device())) {
      throw ConfigError(fmt::format("DataParallel: parameter '{}' is on {}, which the group does not connect", name,
                                    tensor.device().str()));
    }
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second) {
      continue;  // registered under two names
    }
    check_can_be_sent("parameter", name, tensor);
    all_.emplace_back(name, tensor);
    sent.push_back(tensor);
    is_any_trained = is_any_trained || tensor.requires_grad();
  }
  if (!is_any_trained) {
    throw ConfigError("DataParallel: no parameter of the model requires a gradient; there is nothing to do for it");
  }
  if (options_.bucket.count() < 1) {
    throw ConfigError("DataParallel: bucket is 0 bytes; give what several parameters take together, such as 25 MiB");
  }
  for (const auto& [name, tensor] : buffers) {
    check_can_be_sent("buffer", name, tensor);
    sent.push_back(tensor);
  }
  if (const int64_t ranks = options_.shard_group;
      ranks < 0 ||
      (ranks > 0 && (options_.shard == Shard::None || (group_->size() > 1 && group_->size() % ranks != 0)))) {
    throw ConfigError(fmt::format(
        "DataParallel: shard_group is {}, of {} ranks; give a divisor of that number, with shard, or 0 for one "
        "group of all ranks",
        ranks, group_->size()));
  }
  if (options_.shard != Shard::None) {
    make_owners();
  }
  const bool shards_weights = options_.shard == Shard::Weights || (options_.shard == Shard::Auto && is_any_in_file());
  if (shards_weights) {
    std::erase_if(sent, [this](const at::Tensor& tensor) { return owners_->of(tensor) >= 0; });
  }
  group_->broadcast(sent);
  if (shards_weights) {  // last: an exception after it would end this object without the destructor
    shard_weights(/*are_same=*/false);
  }
}

// Whether a rank has made weights in files, because they have no room in its memory.
bool DataParallel::Impl::is_any_in_file() const {
  int64_t is_any = 0;
  for (const auto& [name, parameter] : all_) {
    is_any = detail::is_in_file(parameter) ? 1 : is_any;
  }
  detail::all_reduce(*group_, {&is_any, 1}, ReduceOp::Max);
  return is_any != 0;
}

// As after broadcasts, a graph of before the update is an error on all ranks.
void DataParallel::Impl::note_written() {
  weights_->written();
  for (const auto& [name, parameter] : all_) {
    if (parameter.requires_grad()) {
      parameter.unsafeGetTensorImpl()->bump_version();
    }
  }
}

// Weights are sent one by one, because all weights may have no room. Ranks that have the same weights, by the
// constructor and by each update, send none: a Stepper refuses a step in which weights are written.
void DataParallel::Impl::shard_weights(bool are_same) {
  std::vector<detail::WeightShards::Weight> weights;
  std::vector<std::vector<at::Tensor>> on_weight;
  for (const auto& [name, parameter] : all_) {
    const c10::Storage& storage = parameter.storage();
    const auto is_it = [&](const auto& weight) { return weight.storage.is_alias_of(storage); };
    const auto found = std::find_if(weights.begin(), weights.end(), is_it);
    if (found == weights.end()) {
      weights.push_back({storage, owners_->of(parameter)});
      on_weight.push_back({parameter});
    } else {
      on_weight[static_cast<size_t>(found - weights.begin())].push_back(parameter);
    }
  }
  const auto send_first = [&](size_t number) {
    for (const at::Tensor& parameter : on_weight[number]) {
      if (!are_same && parameter.numel() > 0) {
        group_->broadcast({parameter});
      }
    }
  };
  weights_ = std::make_unique<detail::WeightShards>(*group_, owners_->group(), std::move(weights),
                                                    options_.window.count(), send_first);
  owners_->before_writing = [this] { weights_->finish_reading(); };
  owners_->written = [this] { note_written(); };
}

std::string DataParallel::Impl::explain_shards() const {
  if (group_->size() == 1) {
    return {};
  }
  if (!has_shards()) {
    return fmt::format("Each of the {} ranks has all weights and gradients.\n", group_->size());
  }
  const std::string sent = fmt::format("In a step this rank sends {} of gradients to other ranks.\n",
                                       Bytes(shards_ ? shards_->bytes_of_pass() : 0).str());
  const int in_group = owners_->group().size();
  const std::string ranks = in_group == group_->size() ? fmt::format("Each of the {} ranks", in_group)
                                                       : fmt::format("Each of the {} ranks in each of {} groups",
                                                                     in_group, group_->size() / in_group);
  if (!weights_) {
    int64_t updated = 0;  // by other ranks
    for (const auto& group : options_.optimizer->param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        const bool is_here = owners_->of(parameter) < 0 || owners_->of(parameter) == owners_->group().rank();
        updated += is_here ? 0 : static_cast<int64_t>(parameter.nbytes());
      }
    }
    return fmt::format(
        "{} has all weights, and its share of the gradients and of the optimizer's state. {}An update brings {} of weights "
        "from other ranks.{}\n",
        ranks, sent, Bytes(updated).str(),
        can_shard_weights()
            ? " In shards, if no plan fits otherwise, weights of other ranks would be in no memory of this rank, and would "
              "come for each forward and each backward pass."
            : "");
  }
  return fmt::format(
      "{} has its share of the weights, the gradients and the optimizer's state. {} of weights come from other ranks "
      "through a window of {}, {}. {}",
      ranks, Bytes(weights_->bytes_elsewhere()).str(), Bytes(weights_->window_bytes()).str(),
      weights_->window_bytes() < weights_->bytes_elsewhere()
          ? "again for each forward and each backward pass, unless the window keeps them"
          : "once in a step",
      sent);
}

void DataParallel::Impl::gather_weights() {
  if (weights_) {
    weights_->bring_all();
    weight_bytes_ += weights_->bytes_received();
    weights_.reset();
    owners_->before_writing = owners_->written = {};
    options_.shard = Shard::Gradients;  // Auto too: the program has decided
  }
}

void DataParallel::Impl::make_owners() {
  if (options_.hook || options_.static_graph) {
    throw ConfigError("DataParallel: shard goes with neither hook nor static_graph; leave them out");
  }
  for (const auto& [name, parameter] : all_) {
    if (!parameter.is_cpu()) {
      throw ConfigError(fmt::format("DataParallel: parameter '{}' is on {}, and shards are sent between CPUs only",
                                    name, parameter.device().str()));
    }
  }
  check_optimizer();
  const int64_t ranks = options_.shard_group;
  const auto make_group = [&] { return group_->impl().make_group(static_cast<int>(ranks)); };
  const bool is_part = ranks > 0 && ranks < group_->size();
  owners_ = std::make_shared<detail::Owners>(
      all_, is_part ? group_->impl().attempt("make a group of shards", make_group) : group_);
  options_.optimizer->follow(owners_);
}

// Throws on all ranks, and the same text, if the optimizer of one rank cannot follow.
void DataParallel::Impl::check_optimizer() const {
  enum Reason : int64_t { kNone, kNull, kOther, kFollows, kLacks };  // kLacks + i: the optimizer lacks all_[i]
  const ShardedOptimizer* optimizer = options_.optimizer;
  int64_t reason = kNone;
  if (optimizer == nullptr) {
    reason = kNull;
  } else if (!optimizer->is_over(*group_) || optimizer->has_state()) {
    reason = kOther;
  } else if (optimizer->follows_another()) {
    reason = kFollows;
  } else {
    std::unordered_set<const c10::TensorImpl*> updated;
    for (const auto& group : optimizer->param_groups()) {
      for (const at::Tensor& parameter : group.params()) {
        updated.insert(parameter.unsafeGetTensorImpl());
      }
    }
    for (size_t i = 0; i < all_.size() && reason == kNone; ++i) {
      if (all_[i].second.requires_grad() && !updated.contains(all_[i].second.unsafeGetTensorImpl())) {
        reason = kLacks + static_cast<int64_t>(i);
      }
    }
  }
  detail::all_reduce(*group_, {&reason, 1}, ReduceOp::Max);
  switch (reason) {
    case kNone:
      return;
    case kNull:
      throw ConfigError("DataParallel: shard needs the model's ShardedOptimizer as `optimizer`, on every rank");
    case kOther:
      throw ConfigError(
          "DataParallel: the optimizer of the shards is over another process group, or has a state already, perhaps on "
          "another rank only; make the DataParallel before the first step, and before a state is loaded");
    case kFollows:
      throw ConfigError(
          "DataParallel: the optimizer of the shards already follows another DataParallel; give each DataParallel with "
          "shards an optimizer of its own");
    default:
      throw ConfigError(fmt::format(
          "DataParallel: the optimizer of the shards lacks the trained parameter '{}'; one optimizer must update all "
          "trained parameters of the model, because their gradients are on one rank each",
          all_[static_cast<size_t>(reason - kLacks)].first));
  }
}

void DataParallel::Impl::check_same_model(const char* where) const {
  detail::check_same_model(*group_, "the same options", all_, buffers_, where);
}

bool DataParallel::Impl::take_trained() {
  std::vector<bool> now;
  for (const auto& [name, parameter] : all_) {
    now.push_back(parameter.requires_grad());
  }
  if (now == is_trained_ && (can_send() || parameters_.empty())) {
    return false;
  }
  drop_reducer();
  is_trained_ = std::move(now);
  names_.clear();
  parameters_.clear();
  sent_.clear();
  for (size_t i = 0; i < all_.size(); ++i) {
    if (is_trained_[i]) {
      names_.push_back(all_[i].first);
      parameters_.push_back(all_[i].second);
      sent_.insert(all_[i].second.unsafeGetTensorImpl());
    }
  }
  has_gradient_.assign(parameters_.size(), uint8_t{0});
  is_first_static_pass_ = true;
  if (!parameters_.empty()) {
    make_hooks();
    has_shards() ? make_shards() : make_reducer();
  }
  return true;
}

void DataParallel::Impl::make_hooks() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto accumulator = torch::autograd::impl::grad_accumulator(parameters_[i]);
    using torch::autograd::variable_list;
    const auto key = accumulator->add_post_hook(std::make_unique<torch::autograd::utils::LambdaPostHook>(
        [this, i](const variable_list& outputs, const variable_list& /*inputs*/) {
          take_gradient(i);
          return outputs;
        }));
    hooks_.emplace_back(key, std::move(accumulator));
  }
}

// The Reducer's destructor removes the Reducer's own hooks first.
void DataParallel::Impl::drop_reducer() {
  logger_.reset();
  reducer_.reset();
  hook_ = nullptr;
  if (shards_) {
    bytes_reduced_ += shards_->bytes_sent();
    shards_.reset();
  }
  for (auto& [key, accumulator] : hooks_) {
    accumulator->del_post_hook(key);
  }
  hooks_.clear();
}

DataParallel::Impl::~Impl() {
  drop_reducer();
  if (weights_) {
    owners_->before_writing = [] {
      throw ConfigError("ShardedOptimizer.step: the DataParallel that sharded the weights has ended; keep it");
    };
  }
}

// LibTorch 2.13 and 2.14 have one argument more, with a default value.
void DataParallel::Impl::make_reducer() {
  const int64_t cap = options_.bucket.count();
  std::unordered_map<size_t, std::string> names;
  for (size_t i = 0; i < names_.size(); ++i) {
    names[i] = names_[i];
  }
  reducer_ = std::make_shared<c10d::Reducer>(
      parameters_, first_buckets(parameters_, cap), group_->impl().group, std::vector<bool>(parameters_.size(), false),
      cap, options_.find_unused_parameters, options_.gradient_as_bucket_view, std::move(names),
      std::min(kFirstBucket, cap), /*skip_all_reduce_unused_params=*/false, /*use_python_reducer=*/false,
      /*bucket_bytes_cap_list=*/std::vector<int64_t>{}
#if SNUG_LAZY_BUCKETS
      ,
      /*batched_grad_copy=*/false, /*lazy_bucket_allocation=*/true
#endif
  );
  logger_ = std::make_shared<c10d::Logger>(reducer_);
  reducer_->set_logger(logger_);
  auto hook = std::make_unique<Hook>(*this);
  hook_ = hook.get();
  reducer_->register_comm_hook(std::move(hook));
  if (options_.static_graph) {
    reducer_->set_static_graph();
  }
  has_reduced_ = false;
  let_go_of_views();
  note_buckets();
}

void DataParallel::Impl::make_shards() {
  std::vector<int> owners;
  for (const at::Tensor& parameter : parameters_) {
    owners.push_back(owners_->of(parameter));
  }
  shards_ = std::make_unique<detail::GradientShards>(*group_, owners_->group().size(), parameters_, std::move(owners),
                                                     options_.bucket.count());
  has_reduced_ = false;
}

// Notes the parameters of each bucket for send_zeros(), which makes missing buckets. The Reducer is asked early,
// because asking makes all buckets for a moment, and a rank that fails may have no memory for all buckets.
void DataParallel::Impl::note_buckets() {
  in_buckets_.clear();
  if (kHasLazyBuckets) {
    for (const c10d::GradBucket& bucket : reducer_->get_grad_buckets(/*return_zero_tensors=*/true)) {
      in_buckets_.push_back(bucket.getParameters());
    }
  }
}

// The buckets that the pass has not sent, with zeros. All memory is allocated before the first bucket is sent.
std::vector<GradientBucket> DataParallel::Impl::unsent_zeros() {
  std::vector<GradientBucket> unsent;
  if (!kHasLazyBuckets) {
    std::vector<c10d::GradBucket> buckets = reducer_->get_grad_buckets(/*return_zero_tensors=*/false);
    for (size_t i = hook_->launched(); i < buckets.size(); ++i) {
      unsent.push_back({i, buckets[i].getBufferRef().zero_(), buckets[i].getParameters()});
    }
    return unsent;
  }
  for (size_t i = hook_->launched(); i < in_buckets_.size(); ++i) {
    int64_t elements = 0;
    for (const at::Tensor& parameter : in_buckets_[i]) {
      elements += parameter.numel();
    }
    const auto options = in_buckets_[i].front().options().requires_grad(false);
    unsent.push_back({i, at::zeros({elements}, options), in_buckets_[i]});
  }
  return unsent;
}

void DataParallel::Impl::begin_forward() {
  if (is_in_forward_) {
    throw ConfigError(
        "DataParallel.forward: called inside another forward() of the same DataParallel; call it once around both");
  }
  // With static_graph, the Reducer learns how often each parameter's hook is called, and would count the calls under
  // NoSync as well.
  if (options_.static_graph && quiet_guards > 0) {
    throw ConfigError("DataParallel.forward: NoSync does not go with static_graph; leave one of them out");
  }
  if (c10::GradMode::is_enabled()) {
    check_nobody_takes_gradients();
  }
  if (c10::GradMode::is_enabled() && quiet_guards == 0 && !is_step_begun_) {
    check_trained();
    synchronize();
  }
  is_in_forward_ = true;  // last, because synchronize() throws if the ranks do not meet
}

// Called at moments at which all ranks do the same. A rank without changed parameters compares models only if all ranks
// are certain to compare.
void DataParallel::Impl::check_trained() {
  const bool is_due = take_check();
  if (!take_trained() && !is_due) {
    return;
  }
  try {
    check_same_model("DataParallel.forward");
  } catch (const ConfigError&) {
    start_over();
    is_check_due_ = true;  // perhaps only some ranks change something to cure the error
    throw;
  }
}

// Checks that nobody takes gradients before the gradients are summed. A StepInBackward may be made after the
// constructor.
void DataParallel::Impl::check_nobody_takes_gradients() const {
  for (const auto& [name, parameter] : all_) {
    if (parameter.requires_grad() && detail::has_gradient_hook(parameter)) {
      throw ConfigError(fmt::format(
          "DataParallel.forward: the gradient of parameter '{}' is taken before the ranks' are added up, by a "
          "StepInBackward; leave that out",
          name));
    }
  }
}

void DataParallel::Impl::synchronize() {
  // Inside rebuild_buckets(), rank 0 tells the other ranks about the new buckets.
  if (reducer_ && group_->impl().attempt("broadcast", [&] { return reducer_->rebuild_buckets(); })) {
    let_go_of_views();
    note_buckets();
  }
  if (shards_) {
    shards_->take_order();
  }
  if (options_.broadcast_buffers && !buffers_.empty()) {
    // A graph that waits for its backward pass may have saved buffers: while a graph waits, the buffers do not change.
    send_buffers(*group_, buffers_, /*takes_them=*/group_->rank() != 0 && !is_any_waiting());
  }
}

void DataParallel::Impl::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  const bool is_trained = can_send();
  const bool is_quiet = quiet_guards > 0;
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad() || output.is_leaf()) {
      continue;
    }
    const auto* const node = output.grad_fn().get();
    output.register_hook([weak = weak_from_this(), is_trained, is_quiet, node](const at::Tensor& /*gradient*/) {
      const auto impl = weak.lock();
      if (impl && is_trained) {
        impl->enter_backward(is_quiet, node);
      } else if (impl) {
        std::erase_if(impl->waiting_, [node](const auto& other) { return other.lock().get() == node; });
      }
    });
    if (!is_quiet) {
      waiting_.push_back(detail::weak(output.grad_fn()));
      is_prepared_ = is_prepared_ || is_trained;
    }
  }
}

bool DataParallel::Impl::is_any_waiting() {
  std::erase_if(waiting_, [](const auto& graph) { return graph.expired(); });
  return !waiting_.empty();
}

// Outputs of forward() that the running backward pass reaches, in the form that the Reducer takes: the Reducer looks
// for the parameters in the graphs of the outputs. `output` is the node at which the pass is now; if the pass starts at
// `output`, autograd does not list `output`.
std::vector<at::Tensor> DataParallel::Impl::roots_of_this_pass(const torch::autograd::Node* output) const {
  const detail::UnseenOperators unseen;
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  std::vector<at::Tensor> roots;
  for (const auto& graph : waiting_) {
    if (const auto node = graph.lock(); node && (node.get() == output || nodes->contains(node.get()))) {
      at::Tensor& root = roots.emplace_back(at::empty({0}));
      torch::autograd::impl::set_gradient_edge(root, torch::autograd::Edge(node, 0));
    }
  }
  return roots;
}

void DataParallel::Impl::enter_backward(bool forward_was_quiet, const torch::autograd::Node* output) {
  const int pass = detail::current_pass();
  if (forward_was_quiet != (quiet_guards > 0)) {
    throw ConfigError(
        fmt::format("DataParallel: forward() was called {} NoSync and backward() {}; put both inside, or both outside",
                    forward_was_quiet ? "inside" : "outside", forward_was_quiet ? "outside" : "inside"));
  }
  if (pass == pass_) {
    return;  // forward() had several outputs
  }
  if (!forward_was_quiet) {
    if (!is_prepared_) {
      throw ConfigError(
          "DataParallel: a second backward pass after one forward(), or after several, would leave its gradients on "
          "this rank; sum the losses and go backward once, or put all but the last forward() and backward() inside "
          "NoSync");
    }
    is_prepared_ = false;
    std::fill(has_gradient_.begin(), has_gradient_.end(), uint8_t{0});
    if (shards_) {
      begin_shards(used_in_this_pass());
    } else {
      hook_->reset();
      reducer_->prepare_for_forward();  // counts steps, for the Reducer's statistics
      reducer_->prepare_for_backward(options_.find_unused_parameters ? roots_of_this_pass(output)
                                                                     : std::vector<at::Tensor>{});
    }
    waiting_.clear();
    torch::autograd::Engine::get_default_engine().queue_callback([this] { end_backward(); });
  }
  pass_ = pass;
  is_sending_ = !forward_was_quiet;
  leave_sums_to_one_rank();
}

// A parameter without a gradient that no pass of the step reaches is not waited for, unless that is an error.
std::vector<bool> DataParallel::Impl::used_in_this_pass() const {
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  std::vector<bool> is_used;
  for (const auto& [key, accumulator] : hooks_) {
    is_used.push_back(!options_.find_unused_parameters || nodes->contains(accumulator.get()));
  }
  return is_used;
}

// Sums of an earlier pass stay on one rank and become zero on the other ranks, so the next sum counts each earlier sum
// once. The rank is rank 0, or, with shards, the owner in the first group; a mean of shards is multiplied, because the
// owner's gradient will be divided again.
void DataParallel::Impl::leave_sums_to_one_rank() {
  const bool may_keep = group_->rank() < (shards_ ? owners_->group().size() : 1);
  for (const at::Tensor& parameter : parameters_) {
    const bool is_summed = summed_.erase(parameter.unsafeGetTensorImpl()) > 0;
    if (!is_summed || !parameter.grad().defined()) {
      continue;
    }
    if (!may_keep) {
      parameter.grad().detach().zero_();
    } else if (shards_ && divides()) {
      parameter.grad().detach().mul_(group_->size());
    }
  }
}

// Called when the graph is done, before the Reducer ends the communication that the Reducer has started. Work queued in
// end_backward() runs after the communication has ended.
void DataParallel::Impl::end_backward() {
  if (options_.static_graph) {
    if (std::exchange(is_first_static_pass_, false)) {
      reducer_->delay_all_reduce();
    }
  } else if (!options_.find_unused_parameters) {
    check_all_have_gradients();
  }
  if (shards_) {
    finish_shards(/*counts_all=*/false);
    return;
  }
  torch::autograd::Engine::get_default_engine().queue_callback([this] {
    let_go_of_views();
    note_reduced();
  });
}

void DataParallel::Impl::begin_shards(const std::vector<bool>& is_used) {
  shards_->begin(is_used, divides() ? group_->size() : 1);
  busy_before_ = group_->impl().busy->seconds();
  waited_before_ = shards_->seconds_waited();
}

void DataParallel::Impl::finish_shards(bool counts_all) {
  shards_->finish(options_.find_unused_parameters, counts_all);
  time_.total += group_->impl().busy->seconds() - busy_before_;
  time_.waited += shards_->seconds_waited() - waited_before_;
  note_reduced();
}

// Makes zeros one by one. A backward pass from Join::nothing() would make zeros of the whole model at once.
void DataParallel::Impl::send_shards_of_nothing() {
  begin_shards(std::vector<bool>(parameters_.size(), false));
  finish_shards(/*counts_all=*/true);
}

void DataParallel::Impl::note_reduced() {
  is_reduced_ = true;
  if (options_.reduction == Reduction::Sum || shards_) {
    summed_.insert(sent_.begin(), sent_.end());
  }
  if (!std::exchange(has_reduced_, true)) {
    is_check_due_ = true;
  }
}

// The Reducer leaves gradients that autograd treats as views of buckets, and torch::optim's zero_grad() refuses views.
// let_go_of_views() replaces the views by tensors on the same memory that autograd does not treat as views.
void DataParallel::Impl::let_go_of_views() {
  for (const at::Tensor& parameter : parameters_) {
    at::Tensor& gradient = parameter.mutable_grad();
    if (gradient.defined() && gradient.is_view()) {
      gradient = gradient.detach();
    }
  }
}

void DataParallel::Impl::begin_rehearsal() { ++group_->impl().rehearsals; }

void DataParallel::Impl::end_rehearsal() { --group_->impl().rehearsals; }

void DataParallel::Impl::take_gradient(size_t index) {
  const at::Tensor& gradient = parameters_[index].grad();
  if (gradient.defined() && gradient.layout() != at::kStrided) {
    throw ConfigError(fmt::format(
        "DataParallel: the gradient of parameter '{}' is {}, and the ranks add up dense ones only; make it dense, as an "
        "Embedding without sparse(true) does",
        names_[index], c10::str(gradient.layout())));
  }
  if (group_->impl().rehearsals > 0) {
    return;
  }
  if (detail::current_pass() != pass_) {
    throw ConfigError(fmt::format(
        "DataParallel: a backward pass came to parameter '{}' that did not start at what forward() returned, so "
        "its gradients would differ between ranks; compute the loss inside forward()",
        names_[index]));
  }
  has_gradient_[index] = 1;
  if (shards_ && is_sending_) {
    shards_->complete(index, /*references=*/1);  // autograd's, until the end of the hook
  }
}

void DataParallel::Impl::check_all_have_gradients() const {
  std::vector<std::string> unused;
  for (size_t i = 0; i < names_.size(); ++i) {
    if (!has_gradient_[i]) {
      unused.push_back(names_[i]);
    }
  }
  if (!unused.empty()) {
    throw ConfigError(fmt::format(
        "DataParallel: {} of {} parameters got no gradient on rank {}: {}; use them in the loss, freeze them "
        "(requires_grad_(false)) or set find_unused_parameters",
        unused.size(), names_.size(), group_->rank(), fmt::join(unused, ", ")));
  }
}

void DataParallel::Impl::begin_step() {
  is_in_forward_ = is_prepared_ = false;  // reset after a step that was given up
  waiting_.clear();
  is_reduced_ = !can_send();  // nothing must be reduced
  if (hook_ != nullptr) {
    hook_->reset();
  }
  synchronize();
  if (shards_) {  // later: synchronize() reads the order of the last pass, which begin() forgets
    shards_->begin(std::vector<bool>(parameters_.size(), true), /*divisor=*/1);
  }
  is_step_begun_ = true;
}

// Buckets are sent in order. For buckets that are sent already, send_zeros() only waits. In addition the Reducer makes
// the ranks exchange lists of used parameters: after the last bucket or, with static_graph, before the first bucket of
// the first pass.
void DataParallel::Impl::send_zeros() {
  if (is_reduced_) {
    return;
  }
  if (shards_) {
    shards_->finish_with_zeros(options_.find_unused_parameters);
    return;
  }
  const auto tell_of_none = [&] {
    const auto device = parameters_.front().device();  // the Reducer's: a device may have its own backend
    group_->all_reduce(
        at::zeros({static_cast<int64_t>(parameters_.size())}, at::TensorOptions(at::kInt).device(device)));
  };
  const std::vector<GradientBucket> unsent = unsent_zeros();
  if (options_.static_graph && is_first_static_pass_) {
    tell_of_none();
  }
  for (const GradientBucket& bucket : unsent) {
    hook_->start(bucket.gradients, bucket.parameters);
  }
  if (options_.find_unused_parameters && !options_.static_graph && !unsent.empty()) {
    tell_of_none();
  }
  hook_->finish_all();
}

// Buckets fill one after the other, with two exceptions:
// - parameters are of several kinds;
// - some parameters get no gradient: the parts of a bucket for parameters without a gradient are filled at once.
//
// In the first pass the order is a guess. A step that needs more bytes is made again with a plan that takes less.
int64_t DataParallel::Impl::bucket_bytes_in_backward() const {
  if (!kHasLazyBuckets && !has_shards()) {
    return 0;
  }
  int64_t all = 0, largest = 0;
  bool is_one_kind = true;
  for (const at::Tensor& parameter : parameters_) {
    const auto bytes = static_cast<int64_t>(parameter.nbytes());
    all += bytes;
    largest = std::max(largest, bytes);
    is_one_kind = is_one_kind && parameter.options().type_equal(parameters_.front().options());
  }
  if (has_shards()) {  // what is on its way, and a gradient of another layout or of zeros
    return std::min(options_.bucket.count(), group_->size() * all) + largest;
  }
  const bool fill_in_turn = options_.gradient_as_bucket_view && !options_.find_unused_parameters && is_one_kind;
  return fill_in_turn ? std::min(all, options_.bucket.count() + largest) : all;
}

void DataParallel::Impl::start_over() {
  is_in_forward_ = is_prepared_ = is_step_begun_ = is_reduced_ = is_check_due_ = false;
  pass_ = -1;
  waiting_.clear();
  summed_.clear();
  drop_reducer();
  take_trained();
}

at::Tensor DataParallel::Impl::clip(const std::vector<at::Tensor>& parameters, double max_norm,
                                    const std::function<void()>& before_sending) {
  if (!has_shards()) {
    return max_norm > 0 ? snug::clip_grad_norm_(parameters, max_norm) : grad_norm(parameters);
  }
  const auto counts_here = [this](const at::Tensor& parameter) {
    return (sends(parameter) ? owners_->of(parameter) : 0) == owners_->group().rank();
  };
  return detail::clip_over_ranks(parameters, max_norm, counts_here, [&](const at::Tensor& numbers) {
    if (before_sending) {
      before_sending();
    }
    owners_->group().all_reduce(numbers);
  });
}

const torch::optim::Optimizer* DataParallel::Impl::optimizer_of_shards() const {
  return has_shards() ? options_.optimizer : nullptr;
}

void DataParallel::Impl::check_replicas() const {
  detail::check_replicas(*group_, all_, weights_ ? owners_.get() : nullptr);
}

DataParallel::DataParallel(const NamedTensors& parameters, const NamedTensors& buffers,
                           std::shared_ptr<ProcessGroup> group, DataParallelOptions options)
    : impl_(std::make_shared<Impl>(parameters, buffers, std::move(group), std::move(options))) {
  impl_->take_trained();  // if take_trained() throws, the destructor of Impl removes the hooks
}

DataParallel::~DataParallel() = default;

ProcessGroup& DataParallel::group() const { return impl_->group(); }
at::Tensor DataParallel::clip_grad_norm_(double max_norm) {
  if (!(max_norm > 0)) {
    throw ConfigError(fmt::format("DataParallel.clip_grad_norm_: max_norm is {}; it must be > 0", max_norm));
  }
  std::vector<at::Tensor> parameters;
  for (const auto& [name, parameter] : impl_->all()) {
    parameters.push_back(parameter);
  }
  return impl_->clip(parameters, max_norm);
}
int64_t DataParallel::bytes_reduced() const { return impl_->bytes_reduced(); }
int64_t DataParallel::weight_bytes_received() const { return impl_->weight_bytes_received(); }
const DataParallel::CommunicationTime& DataParallel::communication() const { return impl_->communication(); }
std::unique_ptr<detail::StepRanks> DataParallel::step_ranks(const std::vector<at::Tensor>& of_model) {
  return std::make_unique<detail::RankedStep>(*this, of_model);
}
void DataParallel::gather_weights() { impl_->gather_weights(); }
void DataParallel::check_replicas() const { impl_->check_replicas(); }
void DataParallel::begin_forward() { impl_->begin_forward(); }
void DataParallel::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  impl_->prepare_for_backward(outputs);
}
void DataParallel::end_forward() { impl_->end_forward(); }

NoSync::NoSync(DataParallel& parent) : impl_(parent.impl_) { ++impl_->quiet_guards; }
NoSync::~NoSync() { --impl_->quiet_guards; }

}  // namespace snug

#undef SNUG_LAZY_BUCKETS
