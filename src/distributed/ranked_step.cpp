// How a rank fails
//
// Ranks wait for each other in every collective. A rank that throws in the middle of a step leaves the other ranks
// waiting; and ranks that decide alone whether to repeat a step do not decide alike. Three answers are possible:
//
// - The group is given up as soon as a rank fails. Then one rank that runs out of memory ends the job.
// - Ranks ask each other before every operation that can fail. Every micro-batch then pays for an exchange.
// - A failed rank goes on until the next exchange, and reports the failure in the exchange.
//
// snug takes the third answer. A failed rank sends zeros in the collectives in which the other ranks wait for its
// gradients (go_along), and reports the failure in the next exchange. Every exchange carries all fields of a report
// (RankWord), so the failed rank need not know which exchange the other ranks are in. All ranks see the same reports
// and come to the same decision (judge). If every failure is a rank that ran out of memory and can do with less, all
// ranks repeat the step. Otherwise all ranks drop the step.
//
// Consequences:
// - No rank waits for a failed rank.
// - Memory is allocated before an exchange, not between two exchanges that belong together (send_others).
// - The last exchange comes before the first parameter is written (Write). A rank that fails afterwards, and has not
//   written what the other ranks have written, is left behind. Such a rank says so in the next exchange of items, and
//   all ranks throw until a snapshot is loaded (catch_up).
// - A planning rank runs passes alone, so no collective of the passes is sent (rehearse).

#include "src/distributed/ranked_step.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <unordered_set>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include "snug/accumulation.h"
#include "snug/core.h"
#include "snug/distributed/data_parallel.h"
#include "src/core/fnv1a.h"
#include "src/distributed/data_parallel_impl.h"
#include "src/distributed/process_group_impl.h"
#include "src/distributed/same_model.h"

namespace snug::detail {
namespace {

constexpr char kBetweenNames = '\0';

std::string joined(const std::vector<std::string>& names) {
  return fmt::format("{}", fmt::join(names, std::string(1, kBetweenNames)));
}

}  // namespace

RankedStep::RankedStep(DataParallel& parallel, const std::vector<at::Tensor>& of_model) : parallel_(parallel) {
  std::unordered_set<const c10::TensorImpl*> known;
  for (const at::Tensor& parameter : of_model) {
    known.insert(parameter.unsafeGetTensorImpl());
  }
  for (const auto& [name, parameter] : parallel_.impl().all()) {
    if (!known.contains(parameter.unsafeGetTensorImpl())) {
      throw ConfigError(fmt::format(
          "Stepper: data_parallel holds parameters that are not the model's, such as '{}'; make it of the same model, "
          "after what replaces parameters",
          name));
    }
  }
}

int64_t RankedStep::rank() const { return parallel_.group().rank(); }
int64_t RankedStep::size() const { return parallel_.group().size(); }
const torch::optim::Optimizer* RankedStep::optimizer_of_shards() const {
  return parallel_.impl().optimizer_of_shards();
}
bool RankedStep::are(const ProcessGroup* group) const { return group == &parallel_.group(); }

std::shared_ptr<void> RankedStep::rehearse() const {
  if (parallel_.impl().has_static_graph()) {
    throw ConfigError(
        "Stepper: a memory budget is planned by passes of its own, which a DataParallel with static_graph would take for "
        "steps; leave static_graph out, or set plan = false");
  }
  parallel_.impl().begin_rehearsal();
  return {&parallel_, [](DataParallel* parallel) { parallel->impl().end_rehearsal(); }};
}

int64_t RankedStep::bucket_bytes() const { return parallel_.impl().bucket_bytes_in_backward(); }

int64_t RankedStep::from_rank_zero(int64_t value) const { return gather({value}).front(); }

// Returns [rank][number], with as many numbers for each rank as `own` has.
std::vector<int64_t> RankedStep::gather(const std::vector<int64_t>& own) const {
  const auto ranks = static_cast<size_t>(parallel_.group().size());
  std::vector<int64_t> all(own.size() * ranks);
  std::copy(
      own.begin(), own.end(),
      all.begin() + static_cast<std::ptrdiff_t>(own.size()) * static_cast<std::ptrdiff_t>(parallel_.group().rank()));
  all_reduce(parallel_.group(), all);
  return all;
}

Bytes RankedStep::smallest_budget(Bytes own, bool plans) const {
  const std::vector<int64_t> all = gather({own.count(), plans ? 1 : 0});
  int64_t smallest = own.count();
  for (size_t i = 0; i < all.size(); i += 2) {
    smallest = std::min(smallest, all[i]);
    if (all[i + 1] != all[1]) {
      throw ConfigError(
          fmt::format("Stepper: ranks 0 and {} do not both plan for a memory budget; give the same `plan` on "
                      "devices of the same kind",
                      i / 2));
    }
  }
  return Bytes(smallest);
}

std::string RankedStep::explain_shards() const { return parallel_.impl().explain_shards(); }
bool RankedStep::can_shard_weights() const { return parallel_.impl().can_shard_weights(); }
bool RankedStep::has_weight_shards() const { return parallel_.impl().weight_shards() != nullptr; }

void RankedStep::shard_weights() { parallel_.impl().shard_weights(/*are_same=*/true); }

PlacedBytes RankedStep::weights_of_others() const {
  const WeightShards* weights = parallel_.impl().weight_shards();
  return weights == nullptr ? PlacedBytes()
                            : PlacedBytes{.in_memory = weights->window_bytes() - weights->spare(),
                                          .outside = weights->bytes_elsewhere()};
}

int64_t RankedStep::widen_window(int64_t spare) {
  WeightShards* const weights = parallel_.impl().weight_shards();
  return weights == nullptr ? 0 : weights->widen(spare);
}

int64_t RankedStep::spare() const {
  const WeightShards* weights = parallel_.impl().weight_shards();
  return weights == nullptr ? 0 : weights->spare();
}

void RankedStep::make_all_fit(Bytes budget, const std::function<int64_t()>& live, const std::exception_ptr& failure) {
  const std::vector<int64_t> all = budget.is_unlimited() ? std::vector<int64_t>() : gather({live(), failure ? 1 : 0});
  if (failure) {
    std::rethrow_exception(failure);
  }
  for (size_t i = 0; i < all.size(); i += 2) {
    if (all[i + 1] != 0) {
      throw Error(fmt::format(
          "Stepper: rank {} cannot use its directory for offload; its own message is on its standard error", i / 2));
    }
  }
  for (size_t i = 0; i < all.size(); i += 2) {
    if (all[i] > budget.count() && can_shard_weights()) {
      shard_weights();
      return make_all_fit(budget, live, nullptr);
    }
    if (all[i] > budget.count()) {
      throw BudgetExceeded(fmt::format(
          "Stepper: {} of tensors are alive on rank {} outside of the step, more than the memory budget {}, the "
          "smallest of all ranks; give a larger budget, or {}",
          Bytes(all[i]).str(), i / 2, budget.str(),
          has_weight_shards()
              ? "start more ranks in a group of shards, each of which keeps less of the weights"
              : "keep the weights in shards of several ranks (DataParallelOptions::shard and shard_group, on CPUs only)"));
    }
  }
}

// Unscaling takes memory. A rank without room for the memory reports here, before the other ranks wait for the rank.
std::function<void(const at::Tensor&)> RankedStep::agreement() {
  return [this, group = parallel_.impl().shared_group()](const at::Tensor& found_inf) {
    talk(Talk::Skip, {});
    const at::Tensor sent = group->impl().connects(found_inf.device()) ? found_inf : found_inf.cpu();
    group->all_reduce(sent, ReduceOp::Max);
    if (!sent.is_same(found_inf)) {
      found_inf.copy_(sent);
    }
  };
}

void RankedStep::open(uint32_t trained) {
  heard_.reset();
  trained_ = trained;
  parallel_.impl().take_trained();
}

// --- exchanges

RankedStep::Words RankedStep::exchange(const RankWord& own) const {
  using Row = std::array<int64_t, sizeof(RankWord) / sizeof(int64_t)>;
  const auto row = std::bit_cast<Row>(own);
  const std::vector<int64_t> all = gather({row.begin(), row.end()});
  Words words;
  for (auto begin = all.begin(); begin != all.end(); begin += row.size()) {
    Row of_rank;
    std::copy_n(begin, row.size(), of_rank.begin());
    words.push_back(std::bit_cast<RankWord>(of_rank));
  }
  return words;
}

// Throws on the ranks that have not failed themselves.
RankedStep::Words RankedStep::talk(Talk about, const RankWord& own) {
  Words words = exchange(own);
  if (Verdict verdict = judge(words); verdict.cause != RankFailure::None) {
    heard_ = verdict;
    raise(verdict, about);
  }
  return words;
}

// All ranks see the same reports, so all ranks call drop().
void RankedStep::drop(const std::string& why) {
  heard_ = Verdict{.cause = RankFailure::Other};
  throw ConfigError(why);
}

AgreedSplit RankedStep::agree_on_split(const RankSplit& own) {
  std::vector<RankSplit> splits;
  for (const RankWord& word : talk(Talk::Split, {.split = own})) {
    splits.push_back(word.split);
  }
  const AgreedSplit agreed = agree(splits);
  if (agreed.is_settled) {
    stage_ = Stage::Outside;
  }
  return agreed;
}

// Buckets are made again by a broadcast. Ranks that train other parameters would leave the broadcast out.
void RankedStep::begin(bool has_masters) {
  has_masters_ = has_masters;
  bytes_before_ = parallel_.bytes_reduced();
  bytes_of_others_ = 0;
  time_before_ = parallel_.communication();
  if (parallel_.impl().take_check()) {
    check_trained(talk(Talk::Trained, {.trained = trained_}));
  }
  parallel_.impl().begin_step();
  stage_ = Stage::Begun;
}

void RankedStep::check_trained(const Words& words) {
  const auto is_same = [&](const RankWord& word) { return word.trained == trained_; };
  if (std::all_of(words.begin(), words.end(), is_same)) {
    return;
  }
  heard_ = Verdict{.cause = RankFailure::Other};  // on all ranks, before one rank throws
  parallel_.impl().check_same_model("Stepper.step");
  drop(
      "Stepper.step: ranks differ in what they train, among the parameters that the optimizer holds besides the "
      "model's, or that are no part of data_parallel; freeze and unfreeze the same on every rank");
}

// Ranks that send in each forward pass wait for each other in forward.
void RankedStep::agree_on_passes(const torch::nn::Module& model, int64_t micro_batches) {
  bool sends = false;
  model.apply([&](const torch::nn::Module& module) {
    const auto* sender = dynamic_cast<const SendsInForward*>(&module);
    sends = sends || (sender != nullptr && module.is_training() && are(sender->sends_over()));
  });
  if (!sends) {
    return;
  }
  const Words words = talk(Talk::Passes, {.passes = micro_batches});
  int64_t sum = 0;
  for (const RankWord& word : words) {
    sum += word.passes;
  }
  const auto is_same = [&](const RankWord& word) { return word.passes == micro_batches; };
  if (!std::all_of(words.begin(), words.end(), is_same)) {
    drop(
        fmt::format("Stepper.step: the model has a SyncBatchNorm, in which the ranks wait for each other in every "
                    "forward pass, and they have other numbers of micro-batches: rank {} has {}, {} in all; give "
                    "all ranks batches of the same size, or put the layer into evaluation mode",
                    rank(), micro_batches, sum));
  }
}

double RankedStep::agree_on_items(double items) {
  const auto failure = is_left_behind_ ? RankFailure::LeftBehind : RankFailure::None;
  const Words words =
      talk(Talk::Items, {.failure = static_cast<int64_t>(failure), .trained = trained_, .items = items});
  stage_ = Stage::Agreed;
  check_trained(words);
  double sum = 0;
  for (const RankWord& word : words) {
    sum += word.items;
  }
  return std::max(1.0, std::round(sum));
}

// A rank without items has no names, and gets the names of the first rank that has names.
void RankedStep::agree_on_metrics(const Words& words, std::vector<std::string>& metrics) {
  const auto first = std::ranges::find_if(words, [](const RankWord& word) { return word.metrics != 0; });
  if (first == words.end()) {
    return;
  }
  const auto differs = [&](const RankWord& word) {
    return word.metrics != first->metrics && (word.metrics != 0 || word.items > 0);
  };
  if (const auto other = std::ranges::find_if(words, differs); other != words.end()) {
    drop(
        fmt::format("Stepper.step: the losses of ranks {} and {} have different metrics; give the same names, in the "
                    "same order, on every rank",
                    first - words.begin(), other - words.begin()));
  }
  if (std::ranges::all_of(words, [](const RankWord& word) { return word.metrics != 0; })) {
    return;
  }
  const auto texts = texts_of_all_ranks(parallel_.group(), joined(metrics));
  metrics.assign(1, "");
  for (const char letter : texts[static_cast<size_t>(first - words.begin())]) {
    if (letter == kBetweenNames) {
      metrics.emplace_back();
    } else {
      metrics.back().push_back(letter);
    }
  }
}

// The sums of a device stay on the device, where the ranks add the sums after the exchange. Reading a sum would mean to
// wait for backward, and the device would be idle until the update is queued. A rank without items does not know the
// number of metrics before the exchange, so each rank has room for the largest number.
void RankedStep::sum(double& items, at::Tensor& sums, std::vector<std::string>& metrics, int64_t& batch_items) {
  const c10::Device device = parallel_.impl().all().front().second.device();
  const at::Tensor room = at::zeros({1 + kMostMetrics}, at::TensorOptions(at::kDouble).device(device));
  const at::Tensor loss = room.select(0, 0);
  if (sums.defined()) {
    room.narrow(0, 0, sums.numel()).copy_(sums);
  }
  const Words words =
      talk(Talk::Sums, {.items = items,
                        .loss_sum = device.is_cpu() ? loss.item<double>() : 0.0,
                        .batch_items = batch_items,
                        .metrics = metrics.empty() ? 0 : 1 + static_cast<int64_t>(fnv1a(joined(metrics)))});
  agree_on_metrics(words, metrics);
  double of_losses = 0;
  items = 0;
  batch_items = 0;
  for (const RankWord& word : words) {
    items += word.items;
    of_losses += word.loss_sum;
    batch_items += word.batch_items;
  }
  const auto count = static_cast<int64_t>(metrics.size());
  const at::Tensor used = room.narrow(0, 0, 1 + count);
  if (!device.is_cpu()) {
    parallel_.group().all_reduce(used);
  } else {
    loss.fill_(of_losses);
    if (count > 0) {
      parallel_.group().all_reduce(used.narrow(0, 1, count));
    }
  }
  sums = count > 0 ? used : loss;
}

at::Tensor RankedStep::clip(const std::vector<at::Tensor>& updated, double max_norm) {
  return parallel_.impl().clip(updated, max_norm, [this] { talk(Talk::Norm, {}); });
}

void RankedStep::confirm_writing() {
  talk(Talk::Write, {});
  stage_ = Stage::Writing;
}

void RankedStep::end(StepResult& result) {
  if (size() > 1) {
    result.bytes_sent = parallel_.bytes_reduced() - bytes_before_ + bytes_of_others_;
  }
  const DataParallel::CommunicationTime& now = parallel_.communication();
  result.communication_seconds = now.total - time_before_.total;
  result.communication_waited = now.waited - time_before_.waited;
  parallel_.impl().end_step();
  stage_ = Stage::Outside;
}

// --- gradients

std::vector<at::Tensor> RankedStep::others(const NamedTensors& all) const {
  std::vector<at::Tensor> result;
  for (const auto& [name, parameter] : all) {
    if (has_masters_ || !parallel_.impl().sends(parameter)) {
      result.push_back(parameter);
    }
  }
  return result;
}

// A rank without data has no gradients; a parameter that no rank has used keeps no gradient. All memory is allocated
// before the first exchange: a rank that runs out of memory between two exchanges would be missing in the second.
void RankedStep::send_others(const NamedTensors& all) {
  const std::vector<at::Tensor> parameters = others(all);
  if (parameters.empty()) {
    return;
  }
  ProcessGroup& group = parallel_.group();
  const at::Tensor used = at::zeros({static_cast<int64_t>(parameters.size())}, at::kByte);
  std::vector<std::pair<at::Tensor, at::Tensor>> sent;  // gradient, and the tensor to send
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

std::shared_ptr<void> RankedStep::quiet_unless(bool is_last) {
  return !is_last || has_masters_ ? std::make_shared<NoSync>(parallel_) : nullptr;
}

void RankedStep::send_the_rest(const NamedTensors& all) {
  if (!has_masters_ && !parallel_.impl().is_reduced() && parallel_.impl().has_shards()) {
    parallel_.impl().send_shards_of_nothing();
  } else if (!has_masters_ && !parallel_.impl().is_reduced()) {
    // Sends the gradients of quiet micro-batches too.
    const Join join(parallel_.impl().shared_group(), parallel_.impl().parameters());
    parallel_.forward([&] { return join.nothing(); }).backward();
  }
  const at::NoGradGuard no_grad;
  send_others(all);
  stage_ = Stage::Sent;
}

// --- failing

bool RankedStep::fail(RankFailure failure, const NamedTensors& all, Bytes smallest) {
  const Stage stage = std::exchange(stage_, Stage::Outside);
  auto& impl = parallel_.impl();
  if (!heard_ && (stage == Stage::Writing || stage == Stage::Written)) {
    is_left_behind_ = is_left_behind_ || stage == Stage::Writing;
    lose_group();
    return false;
  }
  if (!heard_) {
    go_along(stage, all);
    heard_ = judge(exchange({.failure = static_cast<int64_t>(failure), .smallest = smallest.count()}));
  }
  if (stage != Stage::Splitting) {  // before, nothing was sent, and the other ranks leave their buckets unchanged
    impl.start_over();
  }
  return std::exchange(heard_, std::nullopt)->is_repeated();
}

void RankedStep::lose_group() {
  parallel_.impl().end_step();
  stage_ = Stage::Outside;
  heard_.reset();
}

// Takes part in the collectives that the other ranks still run before the exchange with the report.
void RankedStep::go_along(Stage stage, const NamedTensors& all) {
  auto& impl = parallel_.impl();
  if (stage == Stage::Outside && !impl.take_check()) {
    impl.begin_step();
  }
  if (stage == Stage::Agreed) {
    if (!has_masters_) {
      impl.send_zeros();
    }
    send_others(all);
    for (const at::Tensor& parameter : others(all)) {
      parameter.mutable_grad().reset();
    }
  }
}

}  // namespace snug::detail
