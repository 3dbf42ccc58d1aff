#include "snug/distributed/sharded_optimizer.h"

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "program/models/gpt.h"
#include "snug/adamw.h"
#include "snug/clip.h"
#include "snug/core.h"
#include "snug/distributed/data_parallel.h"
#include "snug/memory.h"
#include "snug/sgd.h"
#include "snug/snapshot.h"
#include "snug/stepper.h"
#include "src/distributed/launch_environment.h"
#include "tests/distributed/ranks.h"
#include "tests/support/optimizers.h"
#include "tests/support/small_models.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

namespace snug::sharded_optimizer_test {
namespace {

using detail::Environment;
using ::testing::AllOf;
using testing::bytes_of;
using testing::clones_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::is_in_file;
using testing::on_ranks;
using testing::quick;
using testing::same_bits;
using testing::set_gradients;
using testing::squared_error;
using testing::TemporaryFolder;
using testing::tensors_in;
using testing::tiny_batch;
using testing::tiny_model;
using testing::train;
using torch::optim::OptimizerParamGroup;

const ShardedOptimizer::Factory kAdamW = [](const auto& groups) {
  return std::make_unique<AdamW>(groups, AdamWOptions{.lr = 0.01, .weight_decay = 0.1});
};

// Shapes that do not divide evenly, one that lies in memory in another order, and a scalar.
std::vector<torch::Tensor> odd_parameters() {
  torch::manual_seed(1);
  return {torch::randn({31, 37}).requires_grad_(),
          torch::randn({8, 6, 3, 3}).contiguous(torch::MemoryFormat::ChannelsLast).requires_grad_(),
          torch::randn({}).requires_grad_(), torch::randn({100}).requires_grad_(),
          torch::randn({2, 500}).requires_grad_()};
}

// Through a file that all ranks write.
StateDict whole_state(ShardedOptimizer& optimizer, ProcessGroup& group) {
  StateDict whole;
  const std::map<std::string, Stateful> parts{
      {"optimizer", {[&] { return optimizer.state_dict(); }, [&](const StateDict& state) { whole = state; }}}};
  SnapshotStore snapshots(testing::shared_folder());
  group.save_together([&] { snapshots.save(1, parts); });
  snapshots.load_latest(parts);
  group.barrier();
  return whole;
}

std::shared_ptr<ProcessGroup> group_of_one() { return init_process_group({.environment = Environment{}}); }

TEST(ShardedOptimizer, KeepsAQuarterOfTheStateOnEachOfFourRanks) {
  on_ranks(4, [] {
    const auto group = init_process_group(quick());
    Gpt model(GptOptions{.vocab = 64, .context = 16, .layers = 2, .heads = 2, .width = 64});
    set_gradients(model->parameters(), 1);
    const auto live = [] { return live_bytes(torch::kCPU).count(); };
    AdamW plain(model->parameters());
    int64_t before = live();
    plain.step();
    const int64_t whole = live() - before;
    before = live();
    ShardedOptimizer sharded(model->parameters(), group, kAdamW);
    const int64_t foretold = sharded.state_bytes_to_come();
    sharded.step();
    EXPECT_EQ(sharded.state_bytes_to_come(), 0);
    int64_t share = live() - before;
    constexpr int64_t kSlack = 64 * 8 + 4 * 40;  // where parameters are cut, and counts of steps
    for (int i = 0; i < 1000 && share > whole / 4 + kSlack;
         ++i) {  // Gloo's threads let go of what they sent a moment later
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      share = live() - before;
    }
    EXPECT_EQ(whole, 2 * bytes_of(model->parameters()) + 4 * static_cast<int64_t>(model->parameters().size()));
    EXPECT_NEAR(static_cast<double>(share), static_cast<double>(whole) / 4, kSlack);
    EXPECT_NEAR(static_cast<double>(foretold), static_cast<double>(share), kSlack);
  });
}

TEST(ShardedOptimizer, DividesTheStateEvenlyWhateverIsFrozenAndForetellsIt) {
  on_ranks(4, [] {
    const std::vector p = {torch::randn({300, 100}), torch::randn({50, 40}).requires_grad_(), torch::randn({1200})};
    const auto group = init_process_group(quick());
    ShardedOptimizer sharded(p, group, kAdamW);
    int64_t before = 0;
    for (const int64_t elements : {2000, 31200}) {  // that have no state yet
      for (const auto& parameter : p) {
        parameter.mutable_grad() = parameter.requires_grad() ? torch::ones_like(parameter) : torch::Tensor();
      }
      const int64_t foretold = sharded.state_bytes_to_come();
      EXPECT_NEAR(static_cast<double>(foretold), static_cast<double>(8 * elements) / 4, 64 * 8 + 4 * 2);
      sharded.step();
      const int64_t here = bytes_of(sharded.state_tensors());
      EXPECT_EQ(here - std::exchange(before, here), foretold);
      p[0].set_requires_grad(true);
      p[2].set_requires_grad(true);
    }
  });
}

TEST(ShardedOptimizer, KeepsItsShareInAFileOfItsOwnWithTheSameBits) {
  const TemporaryFolder folder;
  on_ranks(2, [&] {
    const auto group = init_process_group(quick());
    const auto a = odd_parameters(), b = odd_parameters();
    ShardedOptimizer memory(a, group, kAdamW), outside(b, group, kAdamW);
    const StateFile file{.directory = folder.path(), .window = Bytes(192 << 10)};
    EXPECT_TRUE(outside.keep_state_in(file));
    for (const auto& [parameters, optimizer] : {std::pair(&a, &memory), {&b, &outside}}) {
      train(*optimizer, *parameters, 1, 3);
    }
    EXPECT_TRUE(is_in_file(outside));
    EXPECT_GT(outside.bytes_with_state_in(file).moved, 0);
    EXPECT_TRUE(same_bits(clones_of(a), clones_of(b)));
    EXPECT_TRUE(same_bits(tensors_in(whole_state(outside, *group)), tensors_in(whole_state(memory, *group))));
    outside.keep_state_in(StateOnDevice());
    for (const auto& [parameters, optimizer] : {std::pair(&a, &memory), {&b, &outside}}) {
      train(*optimizer, *parameters, 4, 5);
    }
    EXPECT_TRUE(same_bits(clones_of(a), clones_of(b)));
  });
}

TEST(ShardedOptimizer, StaysWhereItIsIfTheHostIsTheDevice) {
  on_ranks(2, [&] {
    const auto group = init_process_group(quick());
    ShardedOptimizer sharded(odd_parameters(), group, kAdamW);
    EXPECT_TRUE(sharded.keep_state_in(StateOnHost{}));
    EXPECT_EQ(sharded.state_placement(), StatePlacement(StateOnDevice()));
    EXPECT_EQ(sharded.bytes_with_state_in(StateOnHost{}), MovableState::PlacementBytes());
  });
}

TEST(ShardedOptimizer, LoadsAWholeStateIntoAFile) {
  const TemporaryFolder folder;
  const auto reference = odd_parameters();
  const auto plain = kAdamW({OptimizerParamGroup(reference)});
  train(*plain, reference, 1, 2);
  on_ranks(2, [&] {
    const auto group = init_process_group(quick());
    std::vector<torch::Tensor> parameters;
    for (const auto& each : clones_of(reference)) {
      parameters.push_back(each.requires_grad_());
    }
    ShardedOptimizer outside(parameters, group, kAdamW);
    outside.keep_state_in(StateFile{.directory = folder.path(), .window = Bytes(192 << 10)});
    outside.load_state_dict(plain->state_dict());
    EXPECT_TRUE(is_in_file(outside));
    EXPECT_TRUE(same_bits(tensors_in(whole_state(outside, *group)), tensors_in(plain->state_dict())));
  });
}

// Each rank's gradients are its own, DataParallel makes them the same.
void expect_the_bits_of_the_whole(int ranks, const ShardedOptimizer::Factory& make) {
  on_ranks(ranks, [&] {
    const auto group = init_process_group(quick());
    const auto a = odd_parameters();
    const auto b = odd_parameters();
    b[3].set_requires_grad(false);  // frozen for two steps
    a[3].set_requires_grad(false);
    const auto groups = [](const std::vector<torch::Tensor>& p) {
      return std::vector<OptimizerParamGroup>{{{p[0], p[1]}}, {{p[2], p[3], p[4]}}};
    };
    const auto whole = make(groups(a));
    ShardedOptimizer sharded(groups(b), group, make);
    for (uint64_t step = 1; step <= 4; ++step) {
      for (const auto& p : {a, b}) {
        set_gradients(p, step);
        if (p[3].set_requires_grad(step > 2); step <= 2) {
          p[3].mutable_grad().reset();
        }
      }
      if (step == 3) {  // as a schedule does
        whole->param_groups()[1].options().set_lr(0.05);
        sharded.param_groups()[1].options().set_lr(0.05);
      }
      clip_grad_norm_(a, 1.0);
      clip_grad_norm_(b, 1.0);
      whole->step();
      sharded.step();
      EXPECT_TRUE(same_bits(b, a)) << "step " << step;
    }
    EXPECT_TRUE(b[1].is_contiguous(torch::MemoryFormat::ChannelsLast));
  });
}

TEST(ShardedOptimizer, GivesTheSameBitsWithAdamW) { expect_the_bits_of_the_whole(4, kAdamW); }
TEST(ShardedOptimizer, GivesTheSameBitsWithMomentum) {
  expect_the_bits_of_the_whole(3, [](const auto& groups) {
    return std::make_unique<SGD>(groups, SGDOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true});
  });
}

TEST(ShardedOptimizer, KeepsParametersWholeForAnOptimizerThatWorksInBlocks) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const auto make = [](const auto& groups) {
      return std::make_unique<AdamW8bit>(groups, AdamW8bitOptions{.lr = 0.01, .min_elements = 512});
    };
    auto a = odd_parameters();
    auto b = odd_parameters();
    a.erase(a.begin() + 1);  // is not contiguous
    b.erase(b.begin() + 1);
    const auto whole = make(std::vector{OptimizerParamGroup(a)});
    ShardedOptimizer sharded(b, group, make);
    const int64_t foretold = sharded.state_bytes_to_come();
    for (uint64_t step = 1; step <= 3; ++step) {
      set_gradients(a, step);
      set_gradients(b, step);
      whole->step();
      sharded.step();
    }
    EXPECT_EQ(foretold, bytes_of(sharded.state_tensors())) << "a parameter is one rank's";
    EXPECT_TRUE(same_bits(b, a));
    sharded.load_state_dict(whole->state_dict());
    EXPECT_TRUE(same_bits(tensors_in(whole_state(sharded, *group)), tensors_in(whole->state_dict())));
  });
}

// A GPT on ranks with different data: the same losses, to the bit.
TEST(ShardedOptimizer, TrainsAsWithoutSharding) {
  on_ranks(4, [] {
    const auto group = init_process_group(quick());
    torch::manual_seed(4);
    const auto tokens = torch::randint(32, {8, 8}).chunk(4)[static_cast<size_t>(group->rank())];
    const auto losses = [&](bool is_sharded) {
      torch::manual_seed(3);
      Gpt model(GptOptions{.vocab = 32, .context = 8, .layers = 2, .heads = 2, .width = 16});
      DataParallel ddp(model, group);
      std::unique_ptr<torch::optim::Optimizer> optimizer = kAdamW({OptimizerParamGroup(model->parameters())});
      if (is_sharded) {
        optimizer = std::make_unique<ShardedOptimizer>(model->parameters(), group, kAdamW);
      }
      std::vector<torch::Tensor> result;
      for (int step = 0; step < 5; ++step) {
        optimizer->zero_grad();
        const auto loss = ddp.forward([&] {
          return torch::nn::functional::cross_entropy(model->forward(tokens).reshape({-1, 32}), tokens.reshape({-1}));
        });
        loss.backward();
        optimizer->step();
        result.push_back(loss.detach());
      }
      return result;
    };
    EXPECT_TRUE(same_bits(losses(true), losses(false)));
  });
}

TEST(ShardedOptimizer, SavesAStateThatLoadsAtAnotherWorldSize) {
  on_ranks(3, [] {
    const auto group = init_process_group(quick());
    const auto a = odd_parameters();
    const auto b = odd_parameters();
    const auto whole = kAdamW({OptimizerParamGroup(a)});
    ShardedOptimizer sharded(b, group, kAdamW);
    testing::train(*whole, a, 1, 2);
    testing::train(sharded, b, 1, 2);
    const StateDict state = whole_state(sharded, *group);
    EXPECT_TRUE(same_bits(tensors_in(state), tensors_in(whole->state_dict())));
    // Alone, without and with sharding.
    const auto plain = kAdamW({OptimizerParamGroup(a)});
    plain->load_state_dict(state);
    EXPECT_TRUE(same_bits(tensors_in(plain->state_dict()), tensors_in(state)));
    ShardedOptimizer alone(a, group_of_one(), kAdamW);
    alone.load_state_dict(state);
    EXPECT_TRUE(same_bits(tensors_in(alone.state_dict()), tensors_in(state)));
    // And from one process to three, which go on as it does.
    whole->param_groups()[0].options().set_lr(0.02);
    ShardedOptimizer resumed(b, group, kAdamW);
    resumed.load_state_dict(whole->state_dict());
    testing::train(*whole, a, 3, 4);
    testing::train(resumed, b, 3, 4);
    EXPECT_TRUE(same_bits(b, a));
    EXPECT_THAT(error_of<ConfigError>([&] { resumed.state_dict(); }), HasSubstr("has a share of the state only"));
  });
}

TEST(ShardedOptimizer, LeavesAllAsItWasWhenAStateDoesNotFit) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const auto a = odd_parameters();
    ShardedOptimizer sharded(a, group, kAdamW);
    testing::train(sharded, a, 1, 1);
    auto other = odd_parameters();
    other[0] = torch::randn({31, 38}).requires_grad_();
    const auto wrong = kAdamW({OptimizerParamGroup(other)});
    testing::train(*wrong, other, 1, 1);
    wrong->param_groups()[0].options().set_lr(7);
    EXPECT_THAT(error_of<CorruptFile>([&] { sharded.load_state_dict(wrong->state_dict()); }),
                HasSubstr(group->rank() == 0 ? "[31, 38]" : "share of rank 0"));
    EXPECT_EQ(sharded.param_groups()[0].options().get_lr(), 0.01);
    EXPECT_EQ(whole_state(sharded, *group).get<StateDict>("state").size(), 5);  // still there
  });
}

TEST(ShardedOptimizer, NamesTheParameterThatDiffersBetweenRanks) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const auto p = std::vector{torch::randn({4}), torch::randn({5 + group->rank()})};
    EXPECT_THAT(error_of<ConfigError>([&] { ShardedOptimizer(p, group, kAdamW); }),
                AllOf(HasSubstr("ShardedOptimizer: ranks differ"), HasSubstr("'1': Float [5]"), HasSubstr("[6]")));
  });
}

TEST(ShardedOptimizer, IsSteppedByAStepper) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    struct Masters {
      bool in_stepper, in_adamw;
    };
    for (const auto masters : {Masters{false, false}, Masters{true, false}, Masters{false, true}}) {
      const bool is_low = masters.in_stepper || masters.in_adamw;
      const auto train = [&](auto&& make_optimizer) {
        auto model = tiny_model();
        if (is_low) {
          model->to(torch::kBFloat16);
        }
        const auto optimizer = make_optimizer(model->parameters());
        Stepper stepper(model, *optimizer,
                        {.precision = Precision::BFloat16,
                         .weights = masters.in_stepper ? Weights::Low : Weights::Full,
                         .micro_batch = 4,
                         .clip_norm = 0.1});
        const auto& aware = dynamic_cast<const MemoryAware&>(*optimizer);
        const int64_t foretold = aware.state_bytes_to_come();  // of masters, where there are
        for (int step = 0; step < 3; ++step) {
          const auto result = stepper.step(tiny_batch(12), [&](const Batch& micro) {
            return squared_error(model->forward(is_low ? micro[0].to(torch::kBFloat16) : micro[0]), micro[1]);
          });
          EXPECT_TRUE(result.stepped());
        }
        EXPECT_EQ(bytes_of(aware.state_tensors()), foretold);
        return testing::clones_of(model->parameters());
      };
      const AdamWOptions options{.lr = 0.01, .master_weights = masters.in_adamw};
      const auto make = [&](const auto& groups) { return std::make_unique<AdamW>(groups, options); };
      EXPECT_TRUE(same_bits(train([&](const auto& p) { return std::make_unique<ShardedOptimizer>(p, group, make); }),
                            train([&](const auto& p) { return make(std::vector{OptimizerParamGroup(p)}); })));
    }
  });
}

TEST(ShardedOptimizer, ChangesNothingOnAnyRankWhereOneFails) {
  on_ranks(3, [] {
    const auto group = init_process_group(quick());
    const auto whole = odd_parameters();
    const auto a = odd_parameters();
    const auto optimizer = kAdamW({OptimizerParamGroup(whole)});
    ShardedOptimizer sharded(a, group, kAdamW);
    for (uint64_t step = 1; step <= 2; ++step) {
      set_gradients(whole, step);
      set_gradients(a, step);
      const auto before = testing::clones_of(a);
      const auto refused = [&](double lr) {
        sharded.param_groups()[0].options().set_lr(group->rank() == 1 ? lr : 0.01);
        return error_of<Error>([&] { sharded.step(); });
      };
      EXPECT_THAT(refused(-1), HasSubstr(group->rank() == 1 ? "lr is -1" : "update of rank 1 has failed"));
      EXPECT_TRUE(same_bits(testing::clones_of(a), before));
      sharded.param_groups()[0].options().set_lr(0.01);
      optimizer->step();
      sharded.step();
      EXPECT_TRUE(same_bits(a, whole)) << "step " << step;
    }
  });
}

TEST(ShardedOptimizer, FailsOnAllRanksOfAStepperTogether) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    auto model = tiny_model();
    DataParallel ddp(model, group);
    ShardedOptimizer sharded(model->parameters(), group, kAdamW);
    Stepper stepper(model, sharded, {.ranks = {.data_parallel = &ddp}});
    const auto step = [&](double lr) {
      sharded.param_groups()[0].options().set_lr(lr);
      return stepper.step(tiny_batch(4),
                          [&](const Batch& micro) { return squared_error(model->forward(micro[0]), micro[1]); });
    };
    for (int i = 0; i < 2; ++i) {
      const auto before = testing::clones_of(model->parameters());
      EXPECT_THAT(error_of<Error>([&] { step(group->rank() == 1 ? -1 : 0.01); }),
                  HasSubstr(group->rank() == 1 ? "lr is -1" : "rank 1 failed in this step"));
      EXPECT_TRUE(same_bits(testing::clones_of(model->parameters()), before));
      EXPECT_TRUE(step(0.01).stepped()) << "nobody is behind";
    }
    ddp.check_replicas();
  });
}

TEST(ShardedOptimizer, SkipsAFirstStepThatOverflowsThoughMastersAreNewToIt) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    auto model = tiny_model();
    model->to(torch::kHalf);
    const auto make = [](const auto& groups) { return std::make_unique<AdamW>(groups); };
    ShardedOptimizer sharded(model->parameters(), group, make);
    Stepper stepper(
        model, sharded,
        {.precision = Precision::Float16, .weights = Weights::Low, .sixteen_bit = {.scaler = {.init_scale = 1e30}}});
    const auto before = testing::clones_of(model->parameters());
    const auto result = stepper.step(tiny_batch(4), [&](const Batch& micro) {
      return squared_error(model->forward(micro[0].to(torch::kHalf)), micro[1]);
    });
    EXPECT_FALSE(result.stepped());
    EXPECT_TRUE(same_bits(testing::clones_of(model->parameters()), before));
    for (const auto& [name, master] : stepper.full_precision_parameters()) {
      EXPECT_TRUE(master.isfinite().all().item<bool>()) << name;
    }
  });
}

TEST(ShardedOptimizer, RoundsStochasticallyAsWithoutSharding) {
  on_ranks(3, [] {
    const auto group = init_process_group(quick());
    const auto make = [](const auto& groups) {
      return std::make_unique<AdamW>(groups, AdamWOptions{.lr = 0.01, .stochastic_rounding = true});
    };
    const auto low = [] {
      std::vector<torch::Tensor> parameters;
      for (const auto& parameter : odd_parameters()) {
        parameters.push_back(parameter.detach().to(torch::kBFloat16).requires_grad_());
      }
      return parameters;
    };
    const auto a = low();
    const auto b = low();
    const auto whole = make(std::vector{OptimizerParamGroup(a)});
    ShardedOptimizer sharded(b, group, make);
    testing::train(*whole, a, 1, 3);
    testing::train(sharded, b, 1, 3);
    EXPECT_TRUE(same_bits(b, a));
    ShardedOptimizer resumed(b, group, make);  // makes its pieces anew
    resumed.load_state_dict(whole->state_dict());
    testing::train(*whole, a, 4, 5);
    testing::train(resumed, b, 4, 5);
    EXPECT_TRUE(same_bits(b, a));
  });
}

TEST(ShardedOptimizer, TakesAGroupThatIsAddedBeforeTheFirstStepAndRefusesItLater) {
  const auto a = std::vector{torch::ones({8}).requires_grad_(), torch::ones({80}).requires_grad_()};
  const auto added = torch::optim::OptimizerParamGroup(std::vector{torch::ones({8}).requires_grad_()});
  const auto groups_in = [](const ShardedOptimizer& optimizer) {
    return optimizer.state_dict().get<StateDict>("param_groups").size();
  };
  ShardedOptimizer optimizer(a, group_of_one(), kAdamW);
  optimizer.add_param_group(added);
  EXPECT_EQ(groups_in(optimizer), 2);
  testing::train(optimizer, added.params(), 1, 1);
  EXPECT_FALSE(same_bits(added.params()[0].detach(), torch::ones({8})));
  optimizer.add_param_group(OptimizerParamGroup(std::vector{torch::ones({4}).requires_grad_()}));
  EXPECT_THAT(error_of<ConfigError>([&] { groups_in(optimizer); }), HasSubstr("make a new optimizer"));
  EXPECT_THAT(error_of<ConfigError>([&] { optimizer.step(); }), HasSubstr("make a new optimizer"));
}

}  // namespace
}  // namespace snug::sharded_optimizer_test
