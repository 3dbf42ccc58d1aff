#include <algorithm>
#include <functional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/sgd.h"
#include "snug/stepper.h"
#include "src/memory/cpu_allocator.h"
#include "tests/step/planned_training.h"
#include "tests/support/tensors.h"

// A Stepper with a memory budget and a model with state of its own, which planning runs several times.

namespace snug::stepper_plan_state_test {
namespace {

using testing::clones_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;
using namespace testing::planned;

// Goes on, in each forward pass, from where the last one ended.
struct CarryImpl : torch::nn::Module {
  explicit CarryImpl(bool by_buffer) : is_in_buffer(by_buffer) {
    cell = register_module("cell", torch::nn::Linear(kWidth, kWidth));
    hidden = torch::zeros({64, kWidth});
    if (is_in_buffer) {
      register_buffer("hidden", hidden);
    }
  }
  Tensor forward(const Tensor& x) {
    Tensor h = hidden.clone();
    for (int i = 0; i < 6; ++i) {
      h = torch::sigmoid(cell(h) + x);
    }
    const torch::NoGradGuard no_grad;
    if (is_in_buffer) {
      hidden.copy_(h);
    } else {
      hidden = h.detach();
    }
    return h;
  }
  bool is_in_buffer;
  torch::nn::Linear cell{nullptr};
  Tensor hidden;
};
TORCH_MODULE(Carry);

std::vector<double> losses_of_carry(bool is_in_buffer, Bytes budget) {
  torch::manual_seed(1);
  Carry model(is_in_buffer);
  SGD optimizer(model->parameters(), {.lr = 0.1});
  const std::vector<Tensor> before = clones_of(model->parameters());
  Stepper stepper(model, optimizer, {.micro_batch = 64, .budget = {.memory = budget}});
  std::vector<double> losses;
  for (uint64_t i = 0; i < 3; ++i) {
    try {
      const StepResult result = stepper.step(make_batch(64, i), [&](const Batch& micro) {
        return Loss::sum((model->forward(micro[0]) - micro[1]).square().sum(), micro[1].numel());
      });
      losses.push_back(result.loss());
    } catch (const ConfigError&) {
      EXPECT_TRUE(losses.empty() && same_bits(model->parameters(), before)) << "before anything is trained";
      throw;
    }
  }
  return losses;
}

TEST(StepperPlan, RefusesAModelWhoseOwnStatePlanningMovesOn) {
  EXPECT_THAT(error_of<ConfigError>([] { losses_of_carry(/*is_in_buffer=*/false, Bytes(live() + (1 << 20))); }),
              HasSubstr("hidden state in a member"));
}

TEST(StepperPlan, LeavesStateInABufferAsItWas) {
  EXPECT_EQ(losses_of_carry(/*is_in_buffer=*/true, Bytes(live() + (1 << 20))),
            losses_of_carry(/*is_in_buffer=*/true, Bytes::unlimited()));
}

// Scales its result to unit variance, by a parameter that the first batch sets, as in Glow, or gives its memory, as in
// lazy modules.
struct SetByFirstBatchImpl : torch::nn::Module {
  explicit SetByFirstBatchImpl(bool lazy) : is_lazy(lazy) {
    layer = register_module("layer", torch::nn::Linear(kWidth, kWidth));
    scale = register_parameter("scale", is_lazy ? torch::empty({0}) : torch::ones({kWidth}));
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = layer->forward(x);
    if (!is_set) {
      const torch::NoGradGuard no_grad;
      is_lazy ? scale.set_data(1 / h.std(0)) : static_cast<void>(scale.copy_(1 / h.std(0)));
    }
    is_set = true;
    return h * scale;
  }
  bool is_lazy, is_set = false;
  torch::nn::Linear layer = nullptr;
  Tensor scale;
};
TORCH_MODULE(SetByFirstBatch);

TEST(StepperPlan, RefusesAParameterThatTheFirstBatchSetsUntilItHasBeenSet) {
  for (const bool is_lazy : {false, true}) {
    torch::manual_seed(1);
    SetByFirstBatch model(is_lazy);
    AdamW optimizer(model->parameters(), {.lr = 0.01});
    const Batch batch = make_batch(64);
    const auto loss_of = [&](const Batch& micro) {
      return Loss::sum((model->forward(micro[0]) - micro[1]).square().sum(), micro[1].numel());
    };
    const StepperOptions options{.micro_batch = 64, .budget = {.memory = Bytes(live() + (1 << 20))}};
    Stepper stepper(model, optimizer, options);
    const auto weights = clones_of(model->layer->parameters());
    EXPECT_THAT(error_of<ConfigError>([&] { stepper.step(batch, loss_of); }), HasSubstr("all it once before"));
    EXPECT_TRUE(same_bits(model->layer->parameters(), weights));
    EXPECT_FALSE(model->layer->weight.grad().defined());
    model->is_set = false;
    {
      const torch::NoGradGuard no_grad;
      model->forward(batch[0]);
    }
    const Tensor scale = model->scale.clone();
    const double loss = loss_of(batch).value().item<double>() / static_cast<double>(batch[1].numel());
    EXPECT_NEAR(stepper.step(batch, loss_of).loss(), loss, 1e-6) << is_lazy;
    EXPECT_FALSE(same_bits(model->scale, scale)) << "it is trained";
  }
}

// A recurrent network whose state goes from step to step.
struct Recurrent {
  static constexpr int64_t kItems = 64, kTimes = 12;

  Recurrent() {
    torch::manual_seed(2);
    cell = torch::nn::LSTMCell(kWidth, kWidth);
  }
  static Batch batch(uint64_t step) {
    torch::manual_seed(step);
    return {torch::randn({kItems, kTimes, kWidth}), torch::randn({kItems, kWidth})};
  }
  Tensor loss(const Batch& micro) {
    Tensor now_h = h, now_c = c;
    for (int64_t t = 0; t < kTimes; ++t) {
      std::tie(now_h, now_c) = cell->forward(micro[0].select(1, t), std::tuple(now_h, now_c));
    }
    h = now_h.detach();
    c = now_c.detach();
    return torch::mse_loss(now_h, micro[1]);
  }
  std::vector<Tensor> state() const {
    auto tensors = clones_of(cell->parameters());
    tensors.insert(tensors.end(), {h.clone(), c.clone()});
    return tensors;
  }

  torch::nn::LSTMCell cell{nullptr};
  Tensor h = torch::zeros({kItems, kWidth}), c = torch::zeros({kItems, kWidth});
};

constexpr int kSteps = 4;

struct RecurrentRun {
  std::vector<double> losses;
  std::vector<Tensor> state;
  int64_t peak_bytes = 0;  // above what is alive beside it
  int64_t step_downs = 0;
};

RecurrentRun train_plainly() {
  RecurrentRun run;
  Recurrent model;
  AdamW optimizer(model.cell->parameters(), {.lr = 0.01});
  for (uint64_t i = 0; i < kSteps; ++i) {
    optimizer.zero_grad();
    const Tensor loss = model.loss(Recurrent::batch(i));
    loss.backward();
    optimizer.step();
    run.losses.push_back(loss.item<double>());
  }
  run.state = model.state();
  return run;
}

using Trouble = std::function<void(Stepper&, Recurrent&, const Batch&)>;  // before the third step

RecurrentRun train_within(Bytes beside, int64_t micro_batch = 0, const Trouble& trouble = {}) {
  const int64_t before = live();
  const Bytes budget = beside.is_unlimited() ? beside : Bytes(before + beside.count());
  RecurrentRun run;
  Recurrent model;
  AdamW optimizer(model.cell->parameters(), {.lr = 0.01});
  Stepper stepper(model.cell, optimizer,
                  {.micro_batch = micro_batch, .budget = {.memory = budget, .carried = {&model.h, &model.c}}});
  for (uint64_t i = 0; i < kSteps; ++i) {
    const Batch batch = Recurrent::batch(i);
    if (i == 2 && trouble) {
      trouble(stepper, model, batch);
    }
    const StepResult result =
        stepper.step(batch, [&](const Batch& micro) { return Loss::mean(model.loss(micro), micro[1].numel()); });
    detail::fail_allocation_after(0);
    run.losses.push_back(result.loss());
    run.peak_bytes = std::max(run.peak_bytes, result.peak_bytes - before);
    run.step_downs += result.step_downs;
  }
  run.state = model.state();
  return run;
}

// Once the state is assigned.
void fail_in_loss_of(Stepper& stepper, Recurrent& model, const Batch& batch) {
  const Tensor h = model.h, c = model.c;
  int calls = 0;
  const auto loss_of = [&](const Batch& micro) -> Loss {
    ++calls;
    model.loss(micro);
    throw std::runtime_error("no loss");
  };
  EXPECT_THROW(stepper.step(batch, loss_of), std::runtime_error);
  EXPECT_EQ(calls, 1) << "the step, which needs no new plan";
  EXPECT_TRUE(model.h.is_same(h) && model.c.is_same(c));
}

TEST(StepperPlan, CarriesStateFromStepToStepWithTheBitsOfAPlainLoop) {
  const RecurrentRun plain = train_plainly();
  const int64_t plain_bytes = train_within(Bytes::unlimited()).peak_bytes;
  for (const int64_t micro_batch : {int64_t{0}, Recurrent::kItems}) {
    for (const int64_t percent : {100, 70}) {
      SCOPED_TRACE(::testing::Message() << percent << " % of plain training, micro_batch " << micro_batch);
      const Bytes beside(plain_bytes * percent / 100 + (64 << 10));
      const RecurrentRun planned = train_within(beside, micro_batch, fail_in_loss_of);
      EXPECT_EQ(planned.losses, plain.losses);
      EXPECT_TRUE(same_bits(planned.state, plain.state));
      EXPECT_LE(planned.peak_bytes, beside.count());
    }
  }
}

TEST(StepperPlan, CarriesStateIntoAStepThatIsMadeAgain) {
  const RecurrentRun plain = train_plainly();
  const Bytes beside(train_within(Bytes::unlimited()).peak_bytes * 8 / 10);
  int64_t again = 0;
  for (const int64_t k : {20, 140, 260}) {
    const RecurrentRun planned =
        train_within(beside, 0, [k](Stepper&, Recurrent&, const Batch&) { detail::fail_allocation_after(k); });
    EXPECT_EQ(planned.losses, plain.losses) << "allocation " << k;
    EXPECT_TRUE(same_bits(planned.state, plain.state)) << "allocation " << k;
    again += planned.step_downs;
  }
  EXPECT_GT(again, 0);
}

TEST(StepperPlan, DoesNotCutABatchWhoseStateIsCarried) {
  const Batch batch = make_batch(512);
  const int64_t plain = plain_bytes(batch, {}, [] { return deep(); });
  Tensor level = torch::zeros({});
  PlannedTraining run({.budget = {.memory = Bytes(live() + plain * 6 / 10), .carried = {&level}}});
  const auto loss_of = [&](const Batch& micro) {
    const Tensor y = run.model->forward(micro[0]);
    const Tensor before = std::exchange(level, y.detach().mean());
    return Loss::sum((y - micro[1] - before).pow(2).sum(), micro[1].numel());
  };
  EXPECT_TRUE(run.stepper.step(batch, loss_of).stepped());
  EXPECT_EQ(run.stepper.plan()->choice.items, 512);
  EXPECT_THAT(run.stepper.plan()->considered, HasSubstr("not split because of carried state"));
}

TEST(StepperPlan, RefusesACarriedNullPointer) {
  Recurrent model;
  AdamW optimizer(model.cell->parameters());
  EXPECT_THAT(error_of<ConfigError>([&] { Stepper(model.cell, optimizer, {.budget = {.carried = {nullptr}}}); }),
              HasSubstr("null pointer"));
}

// Two networks with one optimizer, of which each step trains the one. What is saved takes most of the memory.
struct PairImpl : torch::nn::Module {
  explicit PairImpl(bool has_other) : trained(very_deep()) {
    register_module("trained", trained);
    if (has_other) {
      other = register_module("other", torch::nn::Linear(kWidth, 512));
    }
  }
  torch::nn::Sequential trained;
  torch::nn::Linear other{nullptr};
};
TORCH_MODULE(Pair);

template <class Optimizer, class Options>
void expect_that_state_of_the_other_is_not_counted(Options of_optimizer) {
  const Batch batch = make_batch(4096);
  const auto peak_bytes = [&](bool has_other, Bytes budget) {
    const int64_t before = live();
    Pair model(has_other);
    Optimizer optimizer(model->parameters(), of_optimizer);
    const int64_t other = live() - before;
    Stepper stepper(model, optimizer, {.micro_batch = 4096, .budget = {.memory = budget}});
    int calls = 0;
    const auto step = [&] {
      stepper.step(batch, [&](const Batch& micro) {
        ++calls;
        return Loss::sum((model->trained->forward(micro[0]) - micro[1]).square().sum(), micro[1].numel());
      });
    };
    step();
    const int64_t peak = stepper.plan()->choice.peak_bytes - other;
    calls = 0;
    step();
    EXPECT_EQ(calls, 1) << "the plan stays";
    return peak;
  };
  const int64_t alone = peak_bytes(false, Bytes(live() + (64 << 20)));
  EXPECT_EQ(peak_bytes(true, Bytes(live() + (64 << 20))), alone);
}

TEST(StepperPlan, DoesNotCountStateOfParametersThatGetNoGradient) {
  expect_that_state_of_the_other_is_not_counted<AdamW>(AdamWOptions{.lr = 0.01});
  expect_that_state_of_the_other_is_not_counted<AdamW8bit>(AdamW8bitOptions{.lr = 0.01});
  expect_that_state_of_the_other_is_not_counted<SGD>(SGDOptions{.lr = 0.01, .momentum = 0.9});
  expect_that_state_of_the_other_is_not_counted<torch::optim::Adam>(torch::optim::AdamOptions(0.01));
}

// Numbers that no Stepper saved would be rounded, or multiplied beyond what a number can hold.
TEST(StepperPlan, RefusesChoicesThatNoStepperSaved) {
  PlannedTraining training({.budget = {.memory = Bytes(int64_t{1} << 30)}});
  StateDict state = training.stepper.state_dict();
  const auto load = [&](const std::string& sizes, const std::string& slices) {
    state.set("micro_batches", R"([{"modes":0,"trained":0,"tensors":[[6,)" + sizes +
                                   R"(]],"batch":8,"items":4,"slices":)" + slices + "}]");
    training.stepper.load_state_dict(state);
  };
  EXPECT_NO_THROW(load("[8,4]", "1"));
  EXPECT_NO_THROW(load("[8,4]", "256"));
  EXPECT_THROW(load("[8,4]", "257"), CorruptFile);
  EXPECT_THROW(load("[8,4]", "1.5"), CorruptFile);
  EXPECT_THROW(load("[8,-4]", "1"), CorruptFile);
  EXPECT_THROW(load("[4294967296,4294967296]", "1"), CorruptFile);
}

}  // namespace
}  // namespace snug::stepper_plan_state_test
