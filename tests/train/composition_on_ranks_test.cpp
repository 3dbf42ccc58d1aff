// composition_test.cpp on two ranks: precision x what is kept for backward x split x dropout and BatchNorm. The reference is a loop written by hand
// that plays both ranks one after the other, with the same parts and seeds; only for BatchNorm over all ranks it is one process with the
// whole batch.

#include <array>
#include <functional>

#include <fmt/format.h>

#include "snug/accumulation/batch_norm.h"
#include "snug/activations/rematerialize.h"
#include "snug/activations/sequential.h"
#include "snug/distributed/sync_batch_norm.h"
#include "snug/precision/autocast.h"
#include "tests/train/ranked_training.h"

namespace snug {
namespace {

enum class Keep { All, Checkpoints, Automatic };
enum class Kind { Plain, Dropout, BatchNorm, Frozen, Synchronised };
constexpr std::array kKeepNames = {"all", "checkpoints", "automatic"};
constexpr std::array kKindNames = {"plain", "dropout", "batch norm", "frozen", "synchronised"};
constexpr int kRanks = 2;
constexpr int kSteps = 3;

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
};

torch::nn::Sequential make_model(Kind kind) {
  if (kind == Kind::Plain || kind == Kind::Dropout) {
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
  for (int step = 0; step < kSteps; ++step) {
    std::vector<torch::Tensor> sum, buffers;
    for (int rank = 0; rank < ranks; ++rank) {
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
    const torch::NoGradGuard no_grad;
    for (size_t i = 0; i < model->buffers().size(); ++i) {
      model->buffers()[i].copy_(buffers[i]);
    }
    for (size_t i = 0; ranks > 1 && i < sum.size(); ++i) {
      model->parameters()[i].mutable_grad().add_(sum[i]);
    }
    optimizer.step();
  }
  return outcome_of(model);
}

// The least that is possible, so that much is rebuilt.
ActivationPlan frugal_plan(const std::function<torch::Tensor()>& loss_of) {
  const StepProfile profile = profile_step(loss_of);
  try {
    return {profile, Bytes(1)};
  } catch (const BudgetExceeded& error) {
    return {profile, error.smallest_feasible()};
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
                  {.precision = cell.precision, .micro_batch = cell.micro_batch, .data_parallel = &ddp});
  for (int step = 0; step < kSteps; ++step) {
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
    EXPECT_LT(testing::relative_difference(found.parameters, expected.parameters), 1e-6);
  }
  if (cell.kind == Kind::Synchronised) {
    EXPECT_LT(testing::relative_difference({found.buffers.begin(), found.buffers.begin() + 2}, expected.buffers), 1e-6);
  } else if (group->rank() == 0) {
    EXPECT_TRUE(same_bits(found.buffers, expected.buffers));
  }
}

void expect_all_cells(Precision precision) {
  on_ranks(kRanks, [&] {
    const auto group = init_process_group(quick());
    int64_t rebuilt = 0;
    for (const Kind kind : {Kind::Plain, Kind::Dropout, Kind::BatchNorm, Kind::Frozen}) {
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

}  // namespace
}  // namespace snug
