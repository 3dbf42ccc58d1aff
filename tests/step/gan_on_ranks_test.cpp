// A generator and its discriminator on several ranks: in one step, as in examples/gan.cpp, and in turn.

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tests/step/ranked_training.h"

namespace snug::gan_on_ranks_test {
namespace {

using torch::Tensor;
namespace nn = torch::nn;

constexpr int64_t kItems = 512, kNoise = 8;
constexpr double kRateOfDiscriminator = 4e-3;

struct GanImpl : nn::Module {
  GanImpl() {
    generator = register_module("generator", testing::make_mlp({kNoise, 64, 64, 2}));
    discriminator = register_module("discriminator", testing::make_mlp({2, 64, 64, 1}));
  }
  void freeze_discriminator(bool frozen) {
    for (const Tensor& parameter : discriminator->parameters()) {
      parameter.set_requires_grad(!frozen);
    }
  }
  Tensor says(const Tensor& points, bool is_real) {
    const Tensor logits = discriminator->forward(points);
    return torch::binary_cross_entropy_with_logits(logits, torch::full_like(logits, is_real ? 1.0 : 0.0));
  }
  Tensor loss_of_generator(const Tensor& made) {
    freeze_discriminator(true);
    const Tensor loss = says(made, true);
    freeze_discriminator(false);
    return loss;
  }
  Tensor loss_of_discriminator(const Tensor& real, const Tensor& made) {
    return says(real, true) + says(made.detach(), false);
  }
  nn::Sequential generator{nullptr}, discriminator{nullptr};
};
TORCH_MODULE(Gan);

Batch batch_of(uint64_t step) {
  torch::manual_seed(100 + step);
  return {torch::randn({kItems, 2}), torch::randn({kItems, kNoise})};
}

template <class M>
std::optional<DataParallel> parallel_of(M& model, const std::shared_ptr<ProcessGroup>& group) {
  return group ? std::optional<DataParallel>(std::in_place, model, group) : std::nullopt;
}
DataParallel* address_of(std::optional<DataParallel>& parallel) { return parallel ? &*parallel : nullptr; }
Batch own(const Batch& batch, const std::shared_ptr<ProcessGroup>& group) {
  return group ? share(batch, *group) : batch;
}

// `group`: null alone.
struct Trained {
  std::vector<Tensor> parameters;
  int64_t peak_bytes = 0;
};

Trained in_one_step(const std::shared_ptr<ProcessGroup>& group, Bytes budget) {
  Gan gan;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(gan->generator->parameters());
  groups.emplace_back(gan->discriminator->parameters(),
                      std::make_unique<torch::optim::AdamWOptions>(kRateOfDiscriminator));
  AdamW optimizer(groups, {.lr = 1e-3});
  auto parallel = parallel_of(gan, group);
  Stepper stepper(gan, optimizer,
                  {.micro_batch = kItems / 4,
                   .budget = {.memory = budget},
                   .ranks = {.data_parallel = address_of(parallel), .check_replicas_every = group ? 1 : 0}});
  Trained trained;
  for (uint64_t step = 0; step < 3; ++step) {
    const StepResult result = stepper.step(own(batch_of(step), group), [&](const Batch& micro) {
      const Tensor made = gan->generator->forward(micro[1]);
      const Tensor of_generator = gan->loss_of_generator(made);
      return Loss::mean(of_generator + gan->loss_of_discriminator(micro[0], made), micro.size());
    });
    EXPECT_EQ(result.step_downs, 0);
    EXPECT_EQ(result.plan_deviation, "");
    trained.peak_bytes = std::max(trained.peak_bytes, result.peak_bytes);
  }
  trained.parameters = clones_of(gan->parameters());
  return trained;
}

std::vector<Tensor> in_turn(const std::shared_ptr<ProcessGroup>& group) {
  Gan gan;
  AdamW of_generator(gan->generator->parameters(), {.lr = 1e-3});
  AdamW of_discriminator(gan->discriminator->parameters(), {.lr = kRateOfDiscriminator});
  auto generators = parallel_of(gan->generator, group), discriminators = parallel_of(gan->discriminator, group);
  Stepper generator(gan->generator, of_generator,
                    {.ranks = {.data_parallel = address_of(generators), .check_replicas_every = group ? 1 : 0}});
  Stepper discriminator(
      gan->discriminator, of_discriminator,
      {.ranks = {.data_parallel = address_of(discriminators), .check_replicas_every = group ? 1 : 0}});
  for (uint64_t step = 0; step < 3; ++step) {
    const Batch batch = own(batch_of(step), group);
    generator.step(batch, [&](const Batch& micro) {
      return Loss::mean(gan->loss_of_generator(gan->generator->forward(micro[1])), micro.size());
    });
    discriminator.step(batch, [&](const Batch& micro) {
      const torch::NoGradGuard no_grad;
      const Tensor made = gan->generator->forward(micro[1]);
      const torch::AutoGradMode grad(true);
      return Loss::mean(gan->loss_of_discriminator(micro[0], made), micro.size());
    });
  }
  return clones_of(gan->parameters());
}

TEST(GanOnRanks, InOneStepIsThatOfTheWholeBatchWithinABudgetToo) {
  on_ranks(2, [] {
    const Trained alone = in_one_step(nullptr, Bytes::unlimited());
    const auto group = init_process_group(quick());
    const Trained ranked = in_one_step(group, Bytes::unlimited());
    for (size_t i = 0; i < alone.parameters.size(); ++i) {
      EXPECT_TRUE(close_in_norm(ranked.parameters[i], alone.parameters[i], 1e-3)) << i;
    }
    const Bytes budget(ranked.peak_bytes - 64 * 1024);
    const Trained planned = in_one_step(group, budget);
    EXPECT_LE(planned.peak_bytes, budget.count());
    EXPECT_TRUE(same_bits(planned.parameters, ranked.parameters));
  });
}

TEST(GanOnRanks, InTurnIsThatOfTheWholeBatch) {
  on_ranks(2, [] {
    const auto alone = in_turn(nullptr);
    const auto ranked = in_turn(init_process_group(quick()));
    for (size_t i = 0; i < alone.size(); ++i) {
      EXPECT_TRUE(close_in_norm(ranked[i], alone[i], 1e-3)) << i;
    }
  });
}

}  // namespace
}  // namespace snug::gan_on_ranks_test
