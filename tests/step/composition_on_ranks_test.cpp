// composition_test.cpp on two ranks: precision x what is kept for backward x split x dropout, BatchNorm and freezing.
// The reference is a loop written by hand that plays both ranks one after the other, with the same parts and seeds;
// only for BatchNorm over all ranks it is one process with the whole batch. Then all that holds or sends gradients,
// with freezing.

#include <array>
#include <functional>

#include <fmt/format.h>

#include "snug/adamw.h"
#include "snug/autocast.h"
#include "snug/clip.h"
#include "snug/distributed/sharded_optimizer.h"
#include "snug/distributed/sync_batch_norm.h"
#include "snug/extra/batch_norm.h"
#include "snug/plan.h"
#include "snug/sliced.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"
#include "tests/step/ranked_training.h"
#include "tests/support/freezing.h"

namespace snug::composition_on_ranks_test {
namespace {

enum class Keep { All, Checkpoints, Automatic };
using testing::freeze_for;
using testing::kFreezingSteps;

enum class Kind { Plain, Dropout, BatchNorm, Frozen, Synchronised, Freezing };
constexpr std::array kKeepNames = {"all", "checkpoints", "automatic"};
constexpr std::array kKindNames = {"plain", "dropout", "batch norm", "frozen", "synchronised", "freezing"};
constexpr int kRanks = 2;

struct Cell {
  Precision precision = Precision::Float32;
  Keep keep = Keep::All;
  Kind kind = Kind::Plain;
  int64_t items = 12;
  int64_t micro_batch = 0;

  std::string str() const {
    return fmt::format("{}, keeps {}, {}, micro-batches of {} of {} items", to_string(precision),
                       kKeepNames[static_cast<size_t>(keep)], kKindNames[static_cast<size_t>(kind)], micro_batch,
                       items);
  }
  bool is_even() const { return micro_batch == 0 || items % (kRanks * micro_batch) == 0; }
  int steps() const { return kind == Kind::Freezing ? kFreezingSteps : 3; }
  void begin(int step, torch::nn::Module& model) const {
    if (kind == Kind::Freezing) {
      freeze_for(step, model);
    }
  }
};

torch::nn::Sequential make_model(Kind kind) {
  if (kind == Kind::Plain || kind == Kind::Dropout || kind == Kind::Freezing) {
    return tiny_model(kind == Kind::Dropout ? 0.25 : 0);
  }
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(6, 16), torch::nn::BatchNorm1d(16), torch::nn::Tanh(),
                              torch::nn::Linear(16, 16), torch::nn::Tanh(), torch::nn::Linear(16, 2));
  return model;
}

// The same in each step of a rank, whoever plays it.
void seed(int step, int rank) { torch::manual_seed(static_cast<uint64_t>(100 + 10 * step + rank)); }

struct Outcome {
  std::vector<torch::Tensor> parameters, buffers;
};

Outcome outcome_of(const torch::nn::Sequential& model) {
  return {clones_of(model->parameters()), clones_of(model->buffers())};
}

// What other ranks have; a frozen parameter has none.
void add_gradients(const std::vector<torch::Tensor>& parameters, const std::vector<torch::Tensor>& others) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (others[i].defined()) {
      parameters[i].mutable_grad().add_(others[i]);
    }
  }
}

Outcome by_hand(const Cell& cell) {
  auto model = make_model(cell.kind);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  std::optional<FrozenBatchNorm> frozen;
  if (cell.kind == Kind::Frozen) {
    frozen.emplace(*model);
  }
  const Batch batch = tiny_batch(cell.items);
  const int ranks = cell.kind == Kind::Synchronised ? 1 : kRanks;
  const auto backward = [&](const Batch& micro) {
    std::optional<Autocast> autocast;
    if (cell.precision == Precision::BFloat16) {
      autocast.emplace(torch::kCPU, torch::kBFloat16);
    }
    auto loss = squared_error(model->forward(micro[0]), micro[1]).value() / static_cast<double>(batch[1].numel());
    autocast.reset();
    loss.backward();
  };
  for (int step = 0; step < cell.steps(); ++step) {
    cell.begin(step, *model);
    std::vector<torch::Tensor> sum, buffers;
    const std::vector<torch::Tensor> at_first = clones_of(model->buffers());
    const auto set_buffers = [&](const std::vector<torch::Tensor>& values) {
      const torch::NoGradGuard no_grad;
      for (size_t i = 0; i < values.size(); ++i) {
        model->buffers()[i].copy_(values[i]);
      }
    };
    for (int rank = 0; rank < ranks; ++rank) {
      set_buffers(at_first);  // every rank begins with the buffers of rank 0
      optimizer.zero_grad();
      seed(step, rank);
      const Batch own = share(batch, rank, ranks);
      for (const Batch& micro : micro_batches(own, cell.micro_batch == 0 ? own.size() : cell.micro_batch)) {
        backward(micro);
      }
      if (rank == 0) {  // its buffers are what all begin the next step with
        sum = gradients_of(*model);
        buffers = clones_of(model->buffers());
      }
    }
    set_buffers(buffers);
    const torch::NoGradGuard no_grad;
    if (ranks > 1) {
      add_gradients(model->parameters(), sum);
    }
    optimizer.step();
  }
  return outcome_of(model);
}

// The least that is possible, so that much is rebuilt.
ActivationPlan frugal_plan(const std::function<torch::Tensor()>& loss_of) {
  const plan::Profile profile = detail::profile_step(loss_of);
  try {
    return detail::unverified_plan(profile, Bytes(1));
  } catch (const BudgetExceeded& error) {
    return detail::unverified_plan(profile, error.smallest_feasible());
  }
}

// `rebuilt` grows by the operators that ran again.
Outcome on_this_rank(const Cell& cell, const std::shared_ptr<ProcessGroup>& group, int64_t& rebuilt) {
  auto model = make_model(cell.kind);
  if (cell.kind == Kind::Synchronised) {
    convert_sync_batch_norm(*model, group);
  }
  std::optional<FrozenBatchNorm> frozen;
  if (cell.kind == Kind::Frozen) {
    frozen.emplace(*model);
  }
  const Batch own = share(tiny_batch(cell.items), *group);
  std::optional<ActivationPlan> plan;
  if (cell.keep == Keep::Automatic) {
    const Batch micro = micro_batches(own, cell.micro_batch == 0 ? own.size() : cell.micro_batch).front();
    plan = frugal_plan([&] {
      std::optional<Autocast> autocast;
      if (cell.precision == Precision::BFloat16) {
        autocast.emplace(torch::kCPU, torch::kBFloat16);
      }
      return squared_error(model->forward(micro[0]), micro[1]).value();
    });
  }
  DataParallel ddp(model, group);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1));
  Stepper stepper(model, optimizer,
                  {.precision = cell.precision, .micro_batch = cell.micro_batch, .ranks = {.data_parallel = &ddp}});
  for (int step = 0; step < cell.steps(); ++step) {
    cell.begin(step, *model);
    seed(step, group->rank());
    std::vector<std::shared_ptr<const std::atomic<int64_t>>> counts;
    stepper.step(own, [&](const Batch& micro) {
      std::optional<Rematerialize> scope;
      if (plan) {
        scope.emplace(*plan);
        counts.push_back(scope->replayed_operators());
      }
      const auto y = cell.keep == Keep::Checkpoints ? checkpoint_sequential(model, 2, micro[0], LastSegment::Recompute)
                                                    : model->forward(micro[0]);
      return squared_error(y, micro[1]);
    });
    for (const auto& count : counts) {
      rebuilt += *count;
    }
  }
  return outcome_of(model);
}

void expect_the_loop_by_hand(const Cell& cell, const std::shared_ptr<ProcessGroup>& group, int64_t& rebuilt) {
  SCOPED_TRACE(cell.str());
  const Outcome found = on_this_rank(cell, group, rebuilt);
  const Outcome expected = by_hand(cell);
  if (cell.kind != Kind::Synchronised && cell.is_even()) {
    EXPECT_TRUE(same_bits(found.parameters, expected.parameters));
  } else {
    EXPECT_TRUE(close_in_norm(found.parameters, expected.parameters, 1e-6));
  }
  if (cell.kind == Kind::Synchronised) {
    const auto statistics = [](const Outcome& of) { return std::vector(of.buffers.begin(), of.buffers.begin() + 2); };
    EXPECT_TRUE(close_in_norm(statistics(found), statistics(expected), 1e-6));
  } else if (group->rank() == 0) {
    EXPECT_TRUE(same_bits(found.buffers, expected.buffers));
  }
}

void expect_all_cells(Precision precision) {
  on_ranks(kRanks, [&] {
    const auto group = init_process_group(quick());
    int64_t rebuilt = 0;
    for (const Kind kind : {Kind::Plain, Kind::Dropout, Kind::BatchNorm, Kind::Frozen, Kind::Freezing}) {
      // At once, three micro-batches, and tails: on rank 0 of 2 items, on rank 1 of 3.
      for (const auto& [items, micro_batch] : {std::pair<int64_t, int64_t>{12, 0}, {12, 2}, {13, 4}}) {
        for (const Keep keep : {Keep::All, Keep::Checkpoints}) {
          expect_the_loop_by_hand({precision, keep, kind, items, micro_batch}, group, rebuilt);
        }
      }
    }
    EXPECT_EQ(rebuilt, 0);
    for (const Kind kind : {Kind::Plain, Kind::Dropout, Kind::BatchNorm, Kind::Frozen}) {  // its profiles take time
      expect_the_loop_by_hand({precision, Keep::Automatic, kind, 13, 4}, group, rebuilt);
    }
    EXPECT_GT(rebuilt, 0);
  });
}

TEST(CompositionOnRanks, EqualsTheLoopWrittenByHandInFp32) { expect_all_cells(Precision::Float32); }
TEST(CompositionOnRanks, EqualsTheLoopWrittenByHandInBf16) { expect_all_cells(Precision::BFloat16); }

// With a group's statistics BF16 would round the two runs' activations apart.
TEST(CompositionOnRanks, EqualsOneProcessWhereBatchNormIsSynchronised) {
  on_ranks(kRanks, [] {
    const auto group = init_process_group(quick());
    int64_t rebuilt = 0;
    for (const Keep keep : {Keep::All, Keep::Checkpoints}) {
      expect_the_loop_by_hand({.keep = keep, .kind = Kind::Synchronised}, group, rebuilt);
    }
  });
}

// --- all that holds or sends gradients, with freezing

enum class Update { Adam, AdamW, Sharded };

struct FreezingCell {
  Update update = Update::AdamW;
  bool is_low = false;  // 16-bit weights, with a layer that stays FP32
  double clip_norm = 0;
  bool accumulates = false;
  bool has_budget = false;
  DataParallelOptions parallel = {};
  int64_t micro_batch = 2;

  std::string str() const {
    return fmt::format("optimizer {}, low {}, clip {}, accumulate {}, budget {}, unused {}, static {}, bucket {}",
                       static_cast<int>(update), is_low, clip_norm, accumulates, has_budget,
                       parallel.find_unused_parameters, parallel.static_graph, parallel.bucket.count());
  }
  StepperOptions options() const {
    StepperOptions options{.clip_norm = clip_norm};
    if (is_low) {
      options.precision = Precision::BFloat16;
      options.weights = Weights::Low;
    }
    (accumulates ? options.accumulate.every : options.micro_batch) = accumulates ? 3 : micro_batch;
    if (has_budget) {
      options.budget.memory = Bytes(1 << 30);
    }
    return options;
  }
};

constexpr int64_t kItems = 12;

torch::nn::Sequential model_of(const FreezingCell& cell) {
  auto model = tiny_model();
  if (cell.is_low) {
    for (const size_t i : {0, 5}) {
      model[i]->to(torch::kBFloat16);
    }
  }
  return model;
}

Loss freezing_loss(const FreezingCell& cell, torch::nn::Sequential& model, const Batch& micro) {
  torch::Tensor x = micro[0];
  for (size_t i = 0; i < model->size(); ++i) {
    if (auto linear = std::dynamic_pointer_cast<torch::nn::LinearImpl>(model->ptr(i))) {
      x = linear->forward(x.to(linear->weight.scalar_type()));
    } else {
      x = i == 2 ? x : x.tanh();
    }
  }
  return squared_error(cell.is_low ? x.to(torch::kFloat) : x, micro[1]);
}

std::unique_ptr<torch::optim::Optimizer> optimizer_of(Update update, const std::vector<torch::Tensor>& parameters,
                                                      const std::shared_ptr<ProcessGroup>& group) {
  const auto adamw = [](const auto& groups) {
    return std::make_unique<AdamW>(groups, AdamWOptions{.lr = 0.01, .weight_decay = 0.1});
  };
  if (update == Update::Adam) {
    return std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(0.01).weight_decay(0.1));
  }
  if (update == Update::Sharded && group != nullptr) {
    return std::make_unique<ShardedOptimizer>(parameters, group, adamw);
  }
  return adamw(std::vector{torch::optim::OptimizerParamGroup(parameters)});
}

std::vector<torch::Tensor> freezing_by_hand(const FreezingCell& cell) {
  auto model = model_of(cell);
  const auto low = model->parameters();
  std::vector<torch::Tensor> updated;
  for (const torch::Tensor& parameter : low) {
    const bool has_master = parameter.scalar_type() != torch::kFloat;
    updated.push_back(has_master ? parameter.detach().to(torch::kFloat).requires_grad_() : parameter);
  }
  const auto optimizer = optimizer_of(cell.update, updated, nullptr);
  const Batch batch = tiny_batch(kItems);
  for (int step = 0; step < kFreezingSteps; ++step) {
    freeze_for(step, *model);
    std::vector<torch::Tensor> sum;
    for (int rank = 0; rank < kRanks; ++rank) {
      optimizer->zero_grad();
      for (const Batch& micro : micro_batches(share(batch, rank, kRanks), cell.micro_batch)) {
        std::optional<Autocast> autocast;
        if (cell.is_low) {
          autocast.emplace(torch::kCPU, torch::kBFloat16);
        }
        const auto loss = freezing_loss(cell, model, micro).value() / static_cast<double>(batch[1].numel());
        autocast.reset();
        loss.backward();
        for (size_t i = 0; i < low.size(); ++i) {
          if (!low[i].is_same(updated[i]) && low[i].grad().defined()) {
            const auto gradient = low[i].grad().to(torch::kFloat);
            updated[i].mutable_grad() = updated[i].grad().defined() ? updated[i].grad() + gradient : gradient;
            low[i].mutable_grad().reset();
          }
        }
      }
      if (rank == 0) {
        sum = gradients_of(updated);
      }
    }
    const torch::NoGradGuard no_grad;
    add_gradients(updated, sum);
    if (cell.clip_norm > 0) {
      clip_grad_norm_(updated, cell.clip_norm);
    }
    optimizer->step();
    for (size_t i = 0; i < low.size(); ++i) {
      if (!low[i].is_same(updated[i])) {
        low[i].copy_(updated[i]);
      }
    }
  }
  return clones_of(low);
}

void expect_freezing_by_hand(const FreezingCell& cell, const std::shared_ptr<ProcessGroup>& group) {
  SCOPED_TRACE(cell.str());
  auto model = model_of(cell);
  DataParallel ddp(model, group, cell.parallel);
  const auto optimizer = optimizer_of(cell.update, model->parameters(), group);
  StepperOptions options = cell.options();
  options.ranks.data_parallel = &ddp;
  options.ranks.check_replicas_every = 1;
  Stepper stepper(model, *optimizer, options);
  const Batch own = share(tiny_batch(kItems), *group);
  const auto loss_of = [&](const Batch& micro) { return freezing_loss(cell, model, micro); };
  for (int step = 0; step < kFreezingSteps; ++step) {
    freeze_for(step, *model);
    if (cell.accumulates) {
      for (const Batch& micro : micro_batches(own, cell.micro_batch)) {
        stepper.accumulate(micro, loss_of);
      }
    } else {
      stepper.step(own, loss_of);
    }
  }
  EXPECT_TRUE(same_bits(clones_of(model->parameters()), freezing_by_hand(cell)));
}

TEST(CompositionOnRanks, FreezesAsTheLoopWrittenByHandWhateverHoldsOrSendsGradients) {
  on_ranks(kRanks, [] {
    const auto group = init_process_group(quick());
    for (const Update update : {Update::Adam, Update::AdamW, Update::Sharded}) {
      for (const bool is_low : {false, true}) {
        for (const bool accumulates : {false, true}) {
          for (const bool has_budget : {false, true}) {
            expect_freezing_by_hand(
                {.update = update, .is_low = is_low, .accumulates = accumulates, .has_budget = has_budget}, group);
          }
        }
        expect_freezing_by_hand({.update = update, .is_low = is_low, .clip_norm = 0.05}, group);
      }
    }
    for (const auto& parallel : {DataParallelOptions{.bucket = Bytes(300)},
                                 DataParallelOptions{.bucket = Bytes(300), .find_unused_parameters = true},
                                 DataParallelOptions{.gradient_as_bucket_view = false}}) {
      expect_freezing_by_hand({.parallel = parallel}, group);
    }
    expect_freezing_by_hand({.parallel = {.bucket = Bytes(300), .static_graph = true}, .micro_batch = 6}, group);
  });
}

}  // namespace
}  // namespace snug::composition_on_ranks_test
