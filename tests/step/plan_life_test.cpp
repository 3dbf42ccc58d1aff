// When a plan is proven, doubted and made anew: steps that grow, windows that grow, modes of parts of a model, and
// budgets that are refused.

#include "src/step/plan_life.h"

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/sgd.h"
#include "snug/stepper.h"
#include "src/memory/cpu_allocator.h"
#include "tests/step/planned_training.h"
#include "tests/support/planned_step.h"
#include "tests/support/tensors.h"

namespace snug::plan_life_test {
namespace {

using detail::next_of;
using detail::PlanEvent;
using detail::PlanNext;
using detail::PlanState;
using torch::Tensor;
using namespace testing::planned;

// As the comment in plan_life.h has it.
TEST(PlanLife, IsATable) {
  using enum PlanNext;
  struct Row {
    PlanEvent event;
    PlanNext read, tried, proven;
  };
  for (const Row& row :
       {Row{PlanEvent::Made, Prove, Prove, Prove}, Row{PlanEvent::MadeOtherwise, PlanAnew, Prove, Prove},
        Row{PlanEvent::MadeByEviction, PlanAnew, PlanAnew, PlanAnew},
        Row{PlanEvent::NoRoom, PlanAnew, LeaveMoreFree, LeaveMoreFree},
        Row{PlanEvent::NoRoomOtherwise, PlanAnew, PlanAnew, PlanAnew},
        Row{PlanEvent::NoRoomLarger, PlanAnew, LeaveMoreFree, PlanAnew}}) {
    SCOPED_TRACE(static_cast<int>(row.event));
    EXPECT_EQ(next_of(PlanState::Read, row.event), row.read);
    EXPECT_EQ(next_of(PlanState::Tried, row.event), row.tried);
    EXPECT_EQ(next_of(PlanState::Proven, row.event), row.proven);
  }
}

struct Deep : torch::nn::Module {
  Deep() {
    for (int i = 0; i < 8; ++i) {
      layers.push_back(register_module(std::to_string(i), torch::nn::Linear(64, 64)));
    }
  }
  Tensor forward(Tensor h) {
    for (int k = 0; k < depth; ++k) {
      h = h + torch::gelu(layers[static_cast<size_t>(k)](h));
    }
    return h;
  }
  std::vector<torch::nn::Linear> layers;
  int depth = 8;
};

// How many of four steps are made, of which the first is small: of one layer, or of few rows.
int steps_made(bool by_rows, bool small_first) {
  torch::manual_seed(1);
  Deep model;
  SGD optimizer(model.parameters(), {.lr = 0.01});
  Stepper stepper(model, optimizer, {.budget = {.memory = Bytes(live() + (1150 << 10))}});
  const Tensor x = torch::randn({512, 64});
  int made = 0;
  for (int step = 0; step < 4; ++step) {
    const bool is_small = small_first && step == 0;
    model.depth = is_small && !by_rows ? 1 : 8;
    const Tensor mask = (torch::arange(512) < (is_small && by_rows ? 32 : 512)).to(torch::kFloat);
    try {
      stepper.step({x, mask}, [&](const Batch& micro) {
        return Loss::mean(model.forward(micro[0].index({micro[1] > 0})).square().mean(), micro.size());
      });
      ++made;
    } catch (const BudgetExceeded&) {
    }
  }
  return made;
}

TEST(PlanLife, OfStepsThatGrowGoesOnAnew) {
  for (const bool by_rows : {false, true}) {
    SCOPED_TRACE(by_rows);
    ASSERT_EQ(steps_made(by_rows, /*small_first=*/false), 4);
    EXPECT_EQ(steps_made(by_rows, /*small_first=*/true), 4);
  }
}

// `sizes_of` gives the sizes of the batch of a step.
void expect_few_plans(const std::function<std::vector<int64_t>(int step)>& sizes_of) {
  const auto make_model = [] {
    torch::manual_seed(1);
    return std::make_shared<Deep>();
  };
  const auto batch_of = [&](int step) {
    torch::manual_seed(static_cast<uint64_t>(step));
    std::vector<int64_t> sizes = sizes_of(step);
    sizes.push_back(64);
    return Batch{torch::randn(sizes)};
  };
  const auto plain = make_model(), planned = make_model();
  SGD plain_optimizer(plain->parameters(), {.lr = 0.01}), optimizer(planned->parameters(), {.lr = 0.01});
  const int64_t budget = live() + (1150 << 10);
  Stepper unlimited(*plain, plain_optimizer);
  Stepper stepper(*planned, optimizer, {.budget = {.memory = Bytes(budget)}});
  int calls = 0, calls_later = 0;
  constexpr int kSteps = 40, kFirst = 10;
  for (int step = 0; step < kSteps; ++step) {
    unlimited.step(batch_of(step), [&](const Batch& b) { return Loss::whole(plain->forward(b[0]).square().mean()); });
    plain->zero_grad();
    calls = 0;
    const StepResult result = stepper.step(batch_of(step), [&](const Batch& b) {
      ++calls;
      return Loss::whole(planned->forward(b[0]).square().mean());
    });
    planned->zero_grad();
    EXPECT_LE(result.peak_bytes, budget);
    calls_later += step < kFirst ? 0 : calls;
  }
  EXPECT_TRUE(stepper.plan()->activations.has_value()) << "the budget is too large for this test";
  EXPECT_EQ(calls_later, kSteps - kFirst) << "no step is planned or repeated";
  EXPECT_TRUE(testing::same_bits(plain->parameters(), planned->parameters()));
}

// The largest batch is among the first, because a plan for less may have no room for more: that depends on times.
TEST(PlanLife, OfBatchesOfManySizesIsThatOfFewPlans) {
  const auto length = [](int step) { return int64_t{step == 2 ? 499 : 300 + step * 137 % 200}; };
  expect_few_plans([&](int step) { return std::vector<int64_t>{1, length(step)}; });
  expect_few_plans([&](int step) {
    return step == 2 ? std::vector<int64_t>{1, 21, 21} : std::vector<int64_t>{1, 14 + step * 5 % 8, 14 + step * 3 % 8};
  });
}

// A mixture of experts: each row of h goes to two of four experts, which the row decides.
struct Experts : torch::nn::Module {
  Experts() {
    for (int e = 0; e < 4; ++e) {
      up.push_back(register_module("up" + std::to_string(e), torch::nn::Linear(48, 128)));
      down.push_back(register_module("down" + std::to_string(e), torch::nn::Linear(128, 48)));
    }
  }
  Tensor forward(Tensor h) {
    for (int layer = 0; layer < 3; ++layer) {
      const auto [weight, expert] = router(h).softmax(-1).topk(2, -1);
      Tensor sum = torch::zeros_like(h);
      for (size_t e = 0; e < up.size(); ++e) {
        const Tensor at = (expert == static_cast<int64_t>(e)).nonzero(), rows = at.select(1, 0);
        const Tensor of_expert = down[e](torch::silu(up[e](h.index_select(0, rows))));
        sum.index_add_(0, rows, of_expert * weight.index({rows, at.select(1, 1)}).unsqueeze(1));
      }
      h = h + sum;
    }
    return h;
  }
  Loss loss(const Batch& b) { return Loss::whole(forward(b[0]).square().mean()); }
  torch::nn::Linear router = register_module("router", torch::nn::Linear(48, 4));
  std::vector<torch::nn::Linear> up, down;
};

// Trains `planned` within `share` of the plain step's activations, and `plain` without a budget, in micro-batches of
// `micro_batch` items. The model runs `micro_batches` times a step, but for the first steps and `more` later steps.
template <class Model>
void expect_no_plans_later(double share, int64_t micro_batch, const std::function<Batch(int step)>& batch_of,
                           int more = 0) {
  const testing::OneThread one_thread;
  const auto make_model = [] {
    torch::manual_seed(1);
    return std::make_shared<Model>();
  };
  const auto plain = make_model(), planned = make_model();
  SGD plain_optimizer(plain->parameters(), {.lr = 0.01}), optimizer(planned->parameters(), {.lr = 0.01});
  Stepper unlimited(*plain, plain_optimizer, {.micro_batch = micro_batch});
  const auto plain_step = [&](int step) {
    return unlimited.step(batch_of(step), [&](const Batch& b) { return plain->loss(b); });
  };
  const StepResult first = plain_step(0);
  const auto budget =
      first.peak_bytes - static_cast<int64_t>((1 - share) * static_cast<double>(first.activation_peak_bytes));
  Stepper stepper(*planned, optimizer, {.micro_batch = micro_batch, .budget = {.memory = Bytes(budget)}});
  constexpr int kSteps = 60, kFirst = 20;
  int made_again = 0;
  for (int step = 0; step < kSteps; ++step) {
    if (step > 0) {
      plain_step(step);
    }
    plain->zero_grad();
    int calls = 0;
    const StepResult result = stepper.step(batch_of(step), [&](const Batch& b) {
      ++calls;
      return planned->loss(b);
    });
    planned->zero_grad();
    EXPECT_LE(result.peak_bytes, budget);
    made_again += step >= kFirst && calls > result.micro_batches ? 1 : 0;
  }
  EXPECT_TRUE(stepper.plan()->activations.has_value()) << "the budget is too large for this test";
  EXPECT_LE(made_again, more);
  EXPECT_TRUE(testing::same_bits(plain->parameters(), planned->parameters()));
}

// In each step other experts get most rows.
TEST(PlanLife, OfStepsWhoseSizesTheDataDecideIsThatOfOnePlan) {
  const auto batch_of = [](int step) {
    torch::manual_seed(static_cast<uint64_t>(step));
    return Batch{torch::randn({400, 48}) + 3 * torch::randn({1, 48})};
  };
  expect_no_plans_later<Experts>(0.5, 0, batch_of);
  expect_no_plans_later<Experts>(0.3, 0, batch_of);
}

// A recurrent network calls other operators for each length of the longest sequence.
struct Sequences : torch::nn::Module {
  Loss loss(const Batch& b) {
    const auto packed = torch::nn::utils::rnn::pack_padded_sequence(b[0], b[1], /*batch_first=*/true);
    const auto results = std::get<0>(recurrent->forward_with_packed_input(packed));
    return Loss::sum(head(results.data()).square().sum(), b[0].size(0));
  }
  torch::nn::LSTM recurrent =
      register_module("recurrent", torch::nn::LSTM(torch::nn::LSTMOptions(16, 24).num_layers(2).batch_first(true)));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(24, 8));
};

// Sequences of equal lengths would go to an operator that alone takes more than the budget. How many steps evict,
// depends on the plan. The 16th of these steps plans, and may come late (plan_life.h).
TEST(PlanLife, OfStepsWhoseOperatorsTheDataDecideIsThatOfFewPlans) {
  static constexpr int64_t kMicroBatch = 16, kLongest = 20;
  expect_no_plans_later<Sequences>(
      0.65, kMicroBatch,
      [](int step) {
        torch::manual_seed(static_cast<uint64_t>(step));
        std::vector<Tensor> lengths;
        for (int i = 0; i < 4; ++i) {
          lengths.push_back(
              std::get<0>((torch::randperm(kLongest) + 1).slice(0, 0, kMicroBatch).sort(0, /*descending=*/true)));
        }
        return Batch{torch::randn({4 * kMicroBatch, kLongest, 16}), torch::cat(lengths)};
      },
      /*more=*/1);
}

int windows_made(const std::vector<int64_t>& sizes) {
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int i = 0; i < 8; ++i) {
    model->push_back(torch::nn::Linear(64, 64));
    model->push_back(torch::nn::GELU());
  }
  SGD optimizer(model->parameters(), {.lr = 0.01});
  Stepper stepper(model, optimizer, {.budget = {.memory = Bytes(live() + (1350 << 10))}, .accumulate = {.every = 2}});
  int made = 0;
  for (int window = 0; window < 3; ++window) {
    try {
      for (const int64_t size : sizes) {
        made += stepper.accumulate({torch::randn({size, 64})},
                                   [&](const Batch& micro) {
                                     return Loss::mean(model->forward(micro[0]).square().mean(), micro.size());
                                   })
                        .has_value()
                    ? 1
                    : 0;
      }
    } catch (const BudgetExceeded&) {
    }
  }
  return made;
}

TEST(PlanLife, OfWindowsWhoseLaterMicroBatchIsLargerIsThatOfEach) {
  ASSERT_EQ(windows_made({512, 64}), 3);
  EXPECT_EQ(windows_made({64, 512}), 3);
}

TEST(PlanLife, BatchesAreNotCutWhereAPartOfTheModelNormalisesByThem) {
  torch::manual_seed(1);
  torch::nn::Sequential body(torch::nn::Linear(kWidth, 64), torch::nn::ReLU()),
      head(torch::nn::Linear(64, 64), torch::nn::BatchNorm1d(64), torch::nn::GELU(), torch::nn::Linear(64, kWidth));
  struct : torch::nn::Module {
  } model;
  model.register_module("body", body.ptr());
  model.register_module("head", head.ptr());
  model.eval();
  head->train();
  SGD optimizer(model.parameters(), {.lr = 0.1});
  const Batch batch = make_batch(4096);
  Stepper stepper(model, optimizer, {.budget = {.memory = Bytes(live() + (2 << 20))}});
  try {
    const StepResult result = stepper.step(batch, [&](const Batch& micro) {
      return Loss::mean(torch::mse_loss(head->forward(body->forward(micro[0])), micro[1]), micro.size());
    });
    EXPECT_EQ(result.micro_batches, 1);
  } catch (const BudgetExceeded& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("the batch is not split because of"));
  }
}

TEST(PlanLife, ABudgetIsRefusedWithinItself) {
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (int i = 0; i < 12; ++i) {
    model->push_back(torch::nn::Linear(128, 128));
    model->push_back(torch::nn::BatchNorm1d(128));
    model->push_back(torch::nn::GELU());
  }
  SGD optimizer(model->parameters(), {.lr = 0.01});
  const Tensor x = torch::randn({8192, 128});
  const Bytes budget(live() + (6 << 20));
  Stepper stepper(model, optimizer, {.budget = {.memory = budget}});
  detail::restart_cpu_peak();
  std::optional<Bytes> smallest;
  try {
    stepper.step(
        {x}, [&](const Batch& micro) { return Loss::mean(model->forward(micro[0]).square().mean(), micro.size()); });
  } catch (const BudgetExceeded& error) {
    smallest = error.smallest_feasible();
  }
  EXPECT_LE(detail::peak_cpu_bytes(), budget.count());
  ASSERT_TRUE(smallest);
  EXPECT_GT(smallest->count(), budget.count()) << "parts of the batch tell what all of it takes";
}

}  // namespace
}  // namespace snug::plan_life_test
