#include "snug/train/detail/ranked_step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <unordered_set>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "snug/core/error.h"
#include "snug/distributed/detail/data_parallel_impl.h"
#include "snug/distributed/join.h"

namespace snug::detail {
namespace {

std::string name_of(double ranks, double sum_of_them) {
  return ranks == 1 ? fmt::format("rank {:.0f}", sum_of_them) : fmt::format("{:.0f} other ranks", ranks);
}

}  // namespace

Rehearsal::Rehearsal(DataParallel* parallel) : parallel_(parallel) {
  if (parallel_ == nullptr) {
    return;
  }
  if (parallel_->impl().has_static_graph()) {
    throw ConfigError(
        "Stepper: memory_budget is planned by passes of its own, which a DataParallel with static_graph would take for "
        "steps; leave static_graph out, or set plan = false");
  }
  parallel_->impl().begin_rehearsal();
}

Rehearsal::~Rehearsal() {
  if (parallel_ != nullptr) {
    parallel_->impl().end_rehearsal();
  }
}

RankedStep::RankedStep(DataParallel* parallel, const std::vector<at::Tensor>& of_model) : parallel_(parallel) {
  if (is_alone()) {
    return;
  }
  std::unordered_set<const c10::TensorImpl*> known;
  for (const at::Tensor& parameter : of_model) {
    known.insert(parameter.unsafeGetTensorImpl());
  }
  for (const auto& [name, parameter] : parallel_->impl().all()) {
    if (!known.contains(parameter.unsafeGetTensorImpl())) {
      throw ConfigError(fmt::format(
          "Stepper: data_parallel holds parameters that are not the model's, such as '{}'; make it of the same model, "
          "after what replaces parameters",
          name));
    }
  }
}

int64_t RankedStep::from_rank_zero(int64_t value) const {
  if (is_alone()) {
    return value;
  }
  const at::Tensor tensor = at::full({1}, value, at::kLong);
  parallel_->group().broadcast({tensor});
  return tensor.item<int64_t>();
}

// [rank][number], of as many numbers as `own` has.
std::vector<int64_t> RankedStep::gather(const std::vector<int64_t>& own) const {
  const auto ranks = static_cast<size_t>(parallel_->group().size());
  std::vector<int64_t> all(own.size() * ranks);
  std::copy(
      own.begin(), own.end(),
      all.begin() + static_cast<std::ptrdiff_t>(own.size()) * static_cast<std::ptrdiff_t>(parallel_->group().rank()));
  parallel_->group().all_reduce(at::from_blob(all.data(), {static_cast<int64_t>(all.size())}, at::kLong));
  return all;
}

Bytes RankedStep::smallest_budget(Bytes own, bool plans) const {
  if (is_alone()) {
    return own;
  }
  const std::vector<int64_t> all = gather({own.count(), plans ? 1 : 0});
  int64_t smallest = own.count();
  for (size_t i = 0; i < all.size(); i += 2) {
    smallest = std::min(smallest, all[i]);
    if (all[i + 1] != all[1]) {
      throw ConfigError(
          fmt::format("Stepper: ranks 0 and {} do not both plan for a memory_budget; give the same `plan` on "
                      "devices of the same kind",
                      i / 2));
    }
  }
  return Bytes(smallest);
}

void RankedStep::check_all_fit(Bytes budget, int64_t live, const std::exception_ptr& failure) const {
  const bool is_asked = !is_alone() && !budget.is_unlimited();
  const std::vector<int64_t> all = is_asked ? gather({live, failure ? 1 : 0}) : std::vector<int64_t>();
  if (failure) {
    std::rethrow_exception(failure);
  }
  for (size_t i = 0; i < all.size(); i += 2) {
    if (all[i + 1] != 0) {
      throw Error(fmt::format("Stepper: rank {} cannot use its directory for offload; see what it says", i / 2));
    }
    if (all[i] > budget.count()) {
      throw BudgetExceeded(fmt::format(
          "Stepper: {} of tensors are alive on rank {} outside of the step, more than memory_budget {}, the "
          "smallest of all ranks",
          Bytes(all[i]).str(), i / 2, budget.str()));
    }
  }
}

// What unscaling allocates comes before C, so a rank that has no room for it is not missed when they agree.
std::function<void(const at::Tensor&)> RankedStep::agreement() {
  if (is_alone()) {
    return nullptr;
  }
  return [this, agree = agree_over(parallel_->impl().shared_group())](const at::Tensor& found_inf) {
    check(exchange({}));
    agree(found_inf);
  };
}

void RankedStep::open(uint32_t trained) {
  if (!is_alone()) {
    trained_ = trained;
    parallel_->impl().take_trained();
  }
}

// --- the split

void RankedStep::begin_split() {
  if (!is_alone()) {
    phase_ = Phase::Splitting;
    is_begun_ = false;
  }
}

RankedStep::Splits RankedStep::exchange_splits(const RankSplit& own, std::optional<Failure> failure,
                                               Bytes smallest) const {
  constexpr int64_t kNone = -1;
  const int64_t what = failure ? static_cast<int64_t>(*failure) : kNone;
  const std::vector<int64_t> all = gather({own.at_most, own.batch, own.is_planned ? 1 : 0, what, smallest.count()});
  Splits result;
  bool is_known = true;
  for (size_t i = 0; i < all.size(); i += 5) {
    result.ranks.push_back({.at_most = all[i], .batch = all[i + 1], .is_planned = all[i + 2] != 0});
    if (all[i + 3] == kNone) {
      continue;
    }
    const auto why = static_cast<Failure>(all[i + 3]);
    ++(why == Failure::TakesLess ? result.failures.takes_less
       : why == Failure::Memory  ? result.failures.out_of_memory
                                 : result.failures.failed);
    result.failures.ranks += static_cast<double>(i / 5);
    result.failed.push_back(i / 5);
    result.smallest = std::max(result.smallest, all[i + 4]);
    is_known = is_known && all[i + 4] > 0;
  }
  result.smallest = is_known ? result.smallest : 0;
  return result;
}

AgreedSplit RankedStep::agree_on_split(const RankSplit& own) {
  const Splits all = exchange_splits(own, std::nullopt, Bytes(0));
  check_splits(all);
  const AgreedSplit agreed = agree(all.ranks);
  if (agreed.is_settled) {
    phase_ = Phase::Outside;
  }
  return agreed;
}

// That a rank has no plan is another thing than that a step ran out of memory.
void RankedStep::check_splits(const Splits& all) {
  if (all.failures.out_of_memory > 0 && all.failures.out_of_memory == all.failures.failures()) {
    phase_ = Phase::Dropped;
    is_repeated_ = false;
    const bool is_one = all.failed.size() == 1;
    throw BudgetExceeded(
        fmt::format("Stepper.step: rank{} {} found no way to make the step within memory_budget, so all ranks dropped "
                    "it; {}",
                    is_one ? "" : "s", fmt::join(all.failed, ", "),
                    all.smallest > 0
                        ? fmt::format("{} ({} bytes) would do there", Bytes(all.smallest).str(), all.smallest)
                    : is_one ? "see what it says"
                             : "see what each of them says"),
        Bytes(all.smallest));
  }
  check(all.failures);
}

// --- the step

// Buckets are made anew by a broadcast, which ranks that train other parameters would leave out.
void RankedStep::begin(bool has_masters) {
  if (is_alone()) {
    return;
  }
  has_masters_ = has_masters;
  bytes_before_ = parallel_->bytes_reduced();
  bytes_of_others_ = 0;
  time_before_ = parallel_->communication();
  is_begun_ = true;
  if (parallel_->impl().take_check()) {
    check_trained(exchange({.trained = static_cast<double>(trained_)}));
  }
  parallel_->impl().begin_step();
  phase_ = Phase::Begun;
}

RankedStep::Numbers RankedStep::exchange(Numbers own) const {
  std::array values = {own.items,      own.trained,       own.loss_sum, own.batch_items, own.passes, own.passes_squared,
                       own.takes_less, own.out_of_memory, own.failed,   own.left_behind, own.ranks};
  const at::Tensor tensor = at::from_blob(values.data(), {static_cast<int64_t>(values.size())}, at::kDouble);
  parallel_->group().all_reduce(tensor);
  return {.items = values[0],
          .trained = values[1],
          .loss_sum = values[2],
          .batch_items = values[3],
          .passes = values[4],
          .passes_squared = values[5],
          .takes_less = values[6],
          .out_of_memory = values[7],
          .failed = values[8],
          .left_behind = values[9],
          .ranks = values[10]};
}

// Throws on the ranks that have not failed themselves.
void RankedStep::check(const Numbers& all) {
  const double failures = all.failures();
  if (failures == 0) {
    return;
  }
  phase_ = Phase::Dropped;
  is_repeated_ = all.is_repeated();
  const std::string who = name_of(failures, all.ranks);
  if (all.left_behind > 0) {
    throw DistributedError(
        fmt::format("Stepper.step: {} failed while it made the last step, which the others made: their parameters "
                    "differ now; go on from a snapshot",
                    who));
  }
  if (all.out_of_memory + all.takes_less > 0) {
    throw BudgetExceeded(
        fmt::format("Stepper.step: {} ran out of memory, so all ranks dropped this step; smaller micro-batches "
                    "on all of them, or a larger memory_budget, may do",
                    who));
  }
  throw DistributedError(
      fmt::format("Stepper.step: {} failed in this step, so all ranks dropped it; see what it says", who));
}

// Unless they are equal each differs from their mean, but for one case in 2^32.
void RankedStep::check_trained(const Numbers& all) {
  check(all);
  if (all.trained == static_cast<double>(trained_) * parallel_->group().size()) {
    return;
  }
  phase_ = Phase::Dropped;
  is_repeated_ = false;
  parallel_->impl().check_same_model("Stepper.step");
  throw ConfigError(
      "Stepper.step: ranks differ in what they train, among the parameters that the optimizer holds besides the "
      "model's, or that are no part of data_parallel; freeze and unfreeze the same on every rank");
}

// They are equal where the mean of the squares is the square of the mean: small integers, so doubles are exact.
void RankedStep::agree_on_passes(int64_t micro_batches) {
  const auto own = static_cast<double>(micro_batches);
  const Numbers all = exchange({.passes = own, .passes_squared = own * own});
  check(all);
  if (all.passes_squared * parallel_->group().size() != all.passes * all.passes) {
    phase_ = Phase::Dropped;
    is_repeated_ = false;
    throw ConfigError(
        fmt::format("Stepper.step: the model has a SyncBatchNorm, in which the ranks wait for each other in every "
                    "forward pass, and they have other numbers of micro-batches: rank {} has {}, {:.0f} in all; give "
                    "all ranks batches of the same size, or put the layer into evaluation mode",
                    parallel_->group().rank(), micro_batches, all.passes));
  }
}

double RankedStep::agree_on_items(double items) {
  Numbers own{.items = items, .trained = static_cast<double>(trained_)};
  if (is_left_behind_) {
    own.left_behind = 1;
    own.ranks = parallel_->group().rank();
  }
  const Numbers all = exchange(own);
  phase_ = Phase::Agreed;
  check_trained(all);
  return std::max(1.0, std::round(all.items));
}

std::vector<at::Tensor> RankedStep::others(const NamedTensors& all) const {
  std::vector<at::Tensor> result;
  for (const auto& [name, parameter] : all) {
    if (has_masters_ || !parallel_->impl().sends(parameter)) {
      result.push_back(parameter);
    }
  }
  return result;
}

// A rank without data has no gradients; a parameter that no rank has used keeps none. All memory is taken before the first exchange: a rank
// that runs out of it between two of them would be missed in the second.
void RankedStep::send_others(const NamedTensors& all) {
  const std::vector<at::Tensor> parameters = others(all);
  if (parameters.empty()) {
    return;
  }
  ProcessGroup& group = parallel_->group();
  const at::Tensor used = at::zeros({static_cast<int64_t>(parameters.size())}, at::kByte);
  std::vector<std::pair<at::Tensor, at::Tensor>> sent;  // gradient, what travels
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor own = parameters[i].grad();
    used[static_cast<int64_t>(i)] = own.defined();
    const at::Tensor gradient = own.defined() ? own : at::zeros_like(parameters[i]);
    sent.emplace_back(gradient, gradient.contiguous());
  }
  group.all_reduce(used, ReduceOp::Max);
  std::vector<std::function<void()>> waits(sent.size());
  for (size_t i = 0; i < sent.size(); ++i) {
    if (used[static_cast<int64_t>(i)].item<bool>()) {
      parameters[i].mutable_grad() = sent[i].first;
      bytes_of_others_ += static_cast<int64_t>(sent[i].first.nbytes());
      waits[i] = group.start_all_reduce(sent[i].second);
    }
  }
  for (size_t i = 0; i < sent.size(); ++i) {
    if (waits[i]) {
      waits[i]();
      if (!sent[i].first.is_same(sent[i].second)) {
        sent[i].first.copy_(sent[i].second);
      }
    }
  }
}

void RankedStep::send_the_rest(const NamedTensors& all) {
  if (is_alone()) {
    return;
  }
  if (!has_masters_ && !parallel_->impl().is_reduced()) {
    // Takes the gradients of quiet micro-batches along.
    const Join join(parallel_->impl().shared_group(), parallel_->impl().parameters());
    parallel_->forward([&] { return join.nothing(); }).backward();
  }
  const at::NoGradGuard no_grad;
  send_others(all);
  phase_ = Phase::Sent;
}

void RankedStep::sum(int64_t& items, at::Tensor& loss_sum, int64_t& batch_items) {
  const double own = loss_sum.defined() ? loss_sum.item<double>() : 0.0;
  const Numbers all =
      exchange({.items = static_cast<double>(items), .loss_sum = own, .batch_items = static_cast<double>(batch_items)});
  phase_ = Phase::Summed;
  check(all);
  items = static_cast<int64_t>(all.items);
  loss_sum = at::scalar_tensor(all.loss_sum, at::kDouble);
  batch_items = static_cast<int64_t>(all.batch_items);
}

void RankedStep::confirm_writing() {
  if (!is_alone()) {
    const Numbers all = exchange({});
    phase_ = Phase::Writing;
    check(all);
  }
}

void RankedStep::written() {
  if (!is_alone()) {
    phase_ = Phase::Written;
  }
}

void RankedStep::end() {
  if (!is_alone()) {
    parallel_->impl().end_step();
    phase_ = Phase::Outside;
  }
}

bool RankedStep::fail(Failure failure, const NamedTensors& all, Bytes smallest) {
  if (is_alone()) {
    return failure == Failure::TakesLess;
  }
  const Phase phase = std::exchange(phase_, Phase::Outside);
  auto& impl = parallel_->impl();
  if (phase == Phase::Dropped) {
    if (is_begun_) {
      impl.start_over();
    }
    return is_repeated_;
  }
  if (failure == Failure::Group || phase == Phase::Writing || phase == Phase::Written) {
    is_left_behind_ = is_left_behind_ || (failure != Failure::Group && phase == Phase::Writing);
    impl.end_step();
    return false;
  }
  const bool is_repeated = tell(failure, phase, all, smallest).is_repeated();
  if (phase != Phase::Splitting) {  // till then nothing was sent, and the others leave their buckets as they are
    impl.start_over();
  }
  return is_repeated;
}

// Goes through what the others still do before they hear of it.
RankedStep::Numbers RankedStep::tell(Failure failure, Phase phase, const NamedTensors& all, Bytes smallest) {
  if (phase == Phase::Splitting) {
    return exchange_splits({}, failure, smallest).failures;
  }
  auto& impl = parallel_->impl();
  if (phase == Phase::Outside && !impl.take_check()) {
    impl.begin_step();
  }
  if (phase == Phase::Agreed) {
    if (!has_masters_) {
      impl.send_zeros();
    }
    send_others(all);
    for (const at::Tensor& parameter : others(all)) {
      parameter.mutable_grad().reset();
    }
  }
  return exchange({.takes_less = failure == Failure::TakesLess ? 1.0 : 0.0,
                   .out_of_memory = failure == Failure::Memory ? 1.0 : 0.0,
                   .failed = failure == Failure::Other ? 1.0 : 0.0,
                   .ranks = static_cast<double>(parallel_->group().rank())});
}

int64_t RankedStep::bytes_sent() const {
  const bool is_sent = !is_alone() && parallel_->group().size() > 1;
  return is_sent ? parallel_->bytes_reduced() - bytes_before_ + bytes_of_others_ : 0;
}

CommunicationTime RankedStep::communication() const {
  if (is_alone()) {
    return {};
  }
  const CommunicationTime& now = parallel_->communication();
  return {.total = now.total - time_before_.total, .waited = now.waited - time_before_.waited};
}

}  // namespace snug::detail
