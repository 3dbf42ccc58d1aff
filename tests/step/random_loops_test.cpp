// Random training loops: a random model, a few parts of loops, steps or windows, an optimizer. A Stepper under a tight
// budget has the bits of the loop without one.
//
// SNUG_RANDOM_LOOPS=100 tries a hundred.

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/sgd.h"
#include "snug/state.h"
#include "snug/stepper.h"
#include "tests/support/optimizers.h"
#include "tests/support/random_loop_parts.h"
#include "tests/support/random_model.h"
#include "tests/support/tensors.h"

namespace snug::random_loops_test {
namespace {

using testing::RandomModel;
using testing::loop_parts::kKinds;
using testing::loop_parts::kWidth;
using testing::loop_parts::Part;
using testing::loop_parts::Tensors;
using torch::Tensor;

constexpr int64_t kSteps = 4;

// A loop that is equal to the bit for equal seeds.
class Loop {
 public:
  explicit Loop(uint64_t seed) : random_(seed), model_(testing::random_model(seed)) {
    torch::nn::Module& module = *model_.module;
    const size_t certain = seed % std::size(kKinds);
    const size_t parts = 1 + random_() % 3;
    for (size_t i = 0; i < parts; ++i) {
      const testing::loop_parts::Kind& kind = kKinds[(certain + i * (1 + random_() % 3)) % std::size(kKinds)];
      if (description_.find(kind.name) == std::string::npos) {
        const auto owner = module.register_module(kind.name, std::make_shared<torch::nn::Module>());
        parts_.push_back(kind.make(std::string(kind.name) == "modes_of_children" ? module : *owner, random_()));
        description_ += std::string(", ") + kind.name;
      }
    }
    windows_ = random_() % 3 == 0;
    if (random_() % 2 == 0) {
      optimizer_ = std::make_unique<AdamW>(trained(), AdamWOptions{.lr = 1e-3});
    } else {
      optimizer_ = std::make_unique<SGD>(trained(), SGDOptions{.lr = 1e-2, .momentum = 0.9});
    }
    description_ = model_.description + description_ + (windows_ ? ", in windows" : ", in steps");
  }

  struct Result {
    Tensors state = {};
    int64_t highest = 0, activations = 0;  // bytes
  };

  Result train(Bytes budget) {
    torch::manual_seed(3);
    Stepper stepper(model_.module, *optimizer_,
                    {.budget = {.memory = budget}, .accumulate = {.every = windows_ ? 2 : 1}});
    Result result;
    for (int64_t step = 0; step < kSteps; ++step) {
      for (const Part& part : parts_) {
        if (part.before_step) {
          part.before_step(step);
        }
      }
      const StepResult one = windows_ ? window(stepper, step) : whole(stepper, step);
      EXPECT_LE(one.peak_bytes, budget.count()) << "in step " << step;
      result.state.push_back(torch::tensor(one.loss(), torch::kDouble));
      result.highest = std::max(result.highest, one.peak_bytes);
      result.activations = std::max(result.activations, one.activation_peak_bytes);
    }
    add_state(result.state);
    return result;
  }

  const std::string& description() const { return description_; }

 private:
  std::vector<Tensor> trained() const {
    Tensors all = model_.module->parameters();
    std::erase_if(all, [](const Tensor& parameter) { return !parameter.requires_grad(); });
    return all;
  }

  Tensor loss(const Tensor& input, int64_t step) {
    const Tensor rows = input.detach().to(torch::kFloat).flatten(1).narrow(1, 0, kWidth);
    Tensor sum = torch::zeros({});
    for (const Part& part : parts_) {
      sum = part.term ? sum + part.term(rows, step) : sum;
    }
    return sum + model_.loss(input);
  }

  StepResult whole(Stepper& stepper, int64_t step) {
    return stepper.step(Batch{model_.input}, [&](const Batch& batch) { return Loss::whole(loss(batch[0], step)); });
  }

  // Two micro-batches, which have other sizes in each step.
  StepResult window(Stepper& stepper, int64_t step) {
    const int64_t items = model_.input.size(0), first = 1 + step % (items - 1);
    const auto loss_of = [&](const Batch& batch) { return Loss::mean(loss(batch[0], step), batch.size()); };
    stepper.accumulate(Batch{model_.input.narrow(0, 0, first)}, loss_of);
    return *stepper.accumulate(Batch{model_.input.narrow(0, first, items - first)}, loss_of);
  }

  void add_state(Tensors& state) const {
    const auto add = [&](const Tensors& more) {
      for (const Tensor& tensor : more) {
        state.push_back(!tensor.defined() ? Tensor()
                                          : (tensor.is_sparse() ? tensor.to_dense() : tensor).detach().clone());
      }
    };
    add(model_.module->parameters());
    add(model_.module->buffers());
    add({model_.input, model_.input.grad()});
    add(testing::tensors_in(optimizer_->state_dict()));
    for (const Part& part : parts_) {
      add(part.state());
    }
    add({torch::rand({4})});  // the generator is where it would be
  }

  std::mt19937_64 random_;
  RandomModel model_;
  std::vector<Part> parts_;
  std::string description_;
  bool windows_ = false;
  std::unique_ptr<FusedOptimizer> optimizer_;
};

int64_t alive() { return live_bytes(torch::kCPU).count(); }

// Within the budget, or within the next ones that are named, or an eighth more where none is.
std::optional<Loop::Result> train_within(uint64_t seed, int64_t room, int64_t most) {
  while (room < most) {
    const int64_t before = alive();
    Loop loop(seed);
    try {
      return loop.train(Bytes(before + room));
    } catch (const BudgetExceeded& error) {
      const int64_t named = error.smallest_feasible().count() - before;
      room = std::max(named, room + room / 8);
    }
  }
  return std::nullopt;
}

int64_t loops_to_try() {
  const char* wanted = std::getenv("SNUG_RANDOM_LOOPS");
  return wanted != nullptr ? std::atoll(wanted) : static_cast<int64_t>(std::size(kKinds));
}

TEST(RandomLoops, HaveTheBitsOfPlainTrainingWithinTheirBytes) {
  int64_t within_less = 0;
  for (int64_t seed = 0; seed < loops_to_try(); ++seed) {
    const auto number = static_cast<uint64_t>(seed);
    const int64_t before = alive();
    std::optional<Loop> loop(std::in_place, number);
    SCOPED_TRACE(loop->description());
    const Loop::Result plain = loop->train(Bytes::unlimited());
    const int64_t all = plain.highest - before, tight = all - plain.activations / 2;
    loop.reset();
    const std::optional<Loop::Result> planned = train_within(number, tight, all);
    if (planned) {
      EXPECT_TRUE(testing::same_bits(planned->state, plain.state));
      ++within_less;
    }
  }
  EXPECT_GT(within_less, loops_to_try() / 2);  // else little was tried
}

}  // namespace
}  // namespace snug::random_loops_test
