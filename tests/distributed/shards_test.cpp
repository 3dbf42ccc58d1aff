// DataParallel with shards: the bits of the way without shards, in less memory.

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <torch/torch.h>
#include <unistd.h>

#include "snug/adamw.h"
#include "snug/checkpoint.h"
#include "snug/clip.h"
#include "snug/core.h"
#include "snug/distributed/data_parallel.h"
#include "snug/distributed/sharded_optimizer.h"
#include "snug/distributed/sync_batch_norm.h"
#include "snug/memory.h"
#include "snug/safetensors.h"
#include "snug/sgd.h"
#include "snug/snapshot.h"
#include "snug/stepper.h"
#include "src/core/file_system.h"
#include "src/distributed/process_group_impl.h"
#include "src/memory/peak_watch.h"
#include "tests/distributed/ranks.h"
#include "tests/support/failing_file_system.h"
#include "tests/support/optimizers.h"
#include "tests/support/small_models.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

namespace snug::shards_test {
namespace {

using testing::bytes_of;
using testing::clones_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::make_mlp;
using testing::on_ranks;
using testing::quick;
using testing::same_bits;
using testing::squared_error;
using testing::tiny_batch;
using testing::tiny_model;

const ShardedOptimizer::Factory kAdamW = [](const auto& groups) {
  return std::make_unique<AdamW>(groups, AdamWOptions{.lr = 0.01, .weight_decay = 0.1});
};

// 12 layers of 256 KiB.
torch::nn::Sequential deep() { return make_mlp(std::vector<int64_t>(13, 256)); }
constexpr int64_t kLayer = (256 * 256 + 256) * 4;

// Whether a pointer to the weight can be had.
bool is_here(const torch::Tensor& weight) {
  try {
    return weight.data_ptr() != nullptr || weight.numel() == 0;
  } catch (const c10::Error&) {
    return false;
  }
}

// Adds a bucket in the order of ranks, as shards do.
const CommHook kInOrderOfRanks = [](GradientBucket bucket, ProcessGroup& group) {
  return std::function<void()>([gradients = bucket.gradients, &group] {
    const torch::Tensor all = group.all_gather(gradients);
    gradients.copy_(all[0]);
    for (int64_t rank = 1; rank < group.size(); ++rank) {
      gradients.add_(all[rank]);
    }
  });
};

// Tied weights; frozen, transposed, scalar and empty parameters; a parameter that only some ranks use, and one that no
// rank uses; buffers; weights that are registered in another order than they are used in.
struct OddImpl : torch::nn::Module {
  OddImpl() {
    torch::manual_seed(1);
    last = register_module("last", torch::nn::Linear(17, 6));
    embedding = register_module("embedding", torch::nn::Embedding(23, 6));
    transposed = register_parameter("transposed", torch::randn({17, 6}).t());
    scalar = register_parameter("scalar", torch::ones({}));
    empty = register_parameter("empty", torch::ones({0, 3}));
    frozen = register_module("frozen", torch::nn::Linear(6, 6));
    for (auto& parameter : frozen->parameters()) {
      parameter.set_requires_grad(false);
    }
    some = register_module("some", torch::nn::Linear(6, 6));
    none = register_module("none", torch::nn::Linear(50, 3));
    norm = register_module("norm", torch::nn::BatchNorm1d(17));
  }
  torch::Tensor forward(const torch::Tensor& words, bool uses_some) {
    torch::Tensor x = frozen->forward(embedding->forward(words)) * scalar + empty.sum();
    if (uses_some) {
      x = x + some->forward(x).tanh();
    }
    return torch::linear(last->forward(norm->forward(x.matmul(transposed))), embedding->weight);
  }
  torch::nn::Linear last{nullptr}, frozen{nullptr}, some{nullptr}, none{nullptr};
  torch::nn::Embedding embedding{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  torch::Tensor transposed, scalar, empty;
};
TORCH_MODULE(Odd);

struct OddRun {
  OddRun(const std::shared_ptr<ProcessGroup>& with, DataParallelOptions options) : group(with) {
    options.find_unused_parameters = true;
    optimizer.emplace(model->parameters(), group, kAdamW);
    if (options.shard != Shard::None) {
      options.optimizer = &*optimizer;
    }
    ddp.emplace(model, group, std::move(options));
  }
  void backward(int step, bool uses_some) {
    torch::manual_seed(static_cast<uint64_t>(100 * step + group->rank()));
    const auto words = torch::randint(23, {9}), targets = torch::randint(23, {9});
    const auto output_of = [&](const torch::Tensor& some_words) { return model->forward(some_words, uses_some); };
    ddp->forward([&] {
         return torch::cross_entropy_loss(is_checkpointed ? checkpoint(output_of, words) : output_of(words), targets);
       })
        .backward();
  }
  std::vector<torch::Tensor> train(int steps, int micro_batches = 1) {
    for (int step = 0; step < steps; ++step) {
      optimizer->zero_grad();
      for (int i = 0; i < micro_batches; ++i) {
        std::optional<NoSync> quiet;
        if (i + 1 < micro_batches) {
          quiet.emplace(*ddp);
        }
        backward(micro_batches * step + i, (step + i + group->rank()) % 2 == 0);
      }
      norms.push_back(ddp->clip_grad_norm_(0.5).item<double>());
      optimizer->step();
    }
    return values();
  }
  std::vector<torch::Tensor> values() {
    auto tensors = clones_of(model->parameters());
    for (const auto& buffer : model->buffers()) {
      tensors.push_back(buffer.clone());
    }
    group->barrier();  // no rank needs another rank's weights any more
    return tensors;
  }

  std::shared_ptr<ProcessGroup> group;
  Odd model;
  std::optional<ShardedOptimizer> optimizer;
  std::optional<DataParallel> ddp;
  std::vector<double> norms;
  bool is_checkpointed = false;
};

void expect_the_bits_of_data_parallel(int ranks, Shard shard, int shard_group = 0) {
  on_ranks(ranks, [&] {
    const auto group = init_process_group(quick());
    for (const auto reduction : {Reduction::Mean, Reduction::Sum}) {
      for (const int micro_batches : {1, 3}) {
        for (const Bytes bucket : {Bytes(64), Bytes(25 << 20)}) {
          OddRun plain(group, {.reduction = reduction, .hook = ranks == 2 ? CommHook() : kInOrderOfRanks});
          OddRun sharded(group, {.bucket = bucket, .reduction = reduction, .shard = shard, .shard_group = shard_group});
          const auto expected = plain.train(5, micro_batches);
          EXPECT_TRUE(same_bits(sharded.train(5, micro_batches), expected));
          EXPECT_EQ(sharded.norms, plain.norms);
        }
      }
    }
  });
}

TEST(ShardedGradients, GiveTheBitsOfDataParallelOnTwoRanks) { expect_the_bits_of_data_parallel(2, Shard::Gradients); }
TEST(ShardedGradients, GiveTheBitsOfSumsInTheOrderOfRanksOnThreeRanks) {
  expect_the_bits_of_data_parallel(3, Shard::Gradients);
}
TEST(ShardedGradients, GiveTheBitsOfSumsInTheOrderOfRanksOnFourRanks) {
  expect_the_bits_of_data_parallel(4, Shard::Gradients);
}

TEST(ShardedGradients, GiveTheBitsOfSumsInTheOrderOfRanksInTwoGroups) {
  expect_the_bits_of_data_parallel(4, Shard::Gradients, /*shard_group=*/2);
}
TEST(ShardedGradients, GiveTheBitsOfSumsInTheOrderOfRanksInThreeGroups) {
  expect_the_bits_of_data_parallel(6, Shard::Gradients, /*shard_group=*/2);
}
TEST(ShardedGradients, GiveTheBitsOfSumsInTheOrderOfRanksInGroupsOfOne) {
  expect_the_bits_of_data_parallel(3, Shard::Gradients, /*shard_group=*/1);
}
TEST(ShardedWeights, GiveTheBitsOfSumsInTheOrderOfRanksInTwoGroups) {
  expect_the_bits_of_data_parallel(4, Shard::Weights, /*shard_group=*/2);
}

TEST(ShardedWeights, GiveTheBitsOfDataParallelOnTwoRanks) { expect_the_bits_of_data_parallel(2, Shard::Weights); }
TEST(ShardedWeights, GiveTheBitsOfSumsInTheOrderOfRanksOnThreeRanks) {
  expect_the_bits_of_data_parallel(3, Shard::Weights);
}
TEST(ShardedWeights, GiveTheBitsOfSumsInTheOrderOfRanksOnFourRanks) {
  expect_the_bits_of_data_parallel(4, Shard::Weights);
}

TEST(ShardedWeights, ComeAgainForACheckpoint) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    OddRun plain(group, {}), sharded(group, {.shard = Shard::Weights, .window = Bytes(1)});
    sharded.is_checkpointed = true;
    EXPECT_TRUE(same_bits(sharded.train(3), plain.train(3)));
  });
}

// The second step begins as the first step did, and ends after two layers.
TEST(ShardedWeights, ComeAheadInTheOrderOfTheStepBefore) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    auto model = deep();
    ShardedOptimizer optimizer(model->parameters(), group, kAdamW);
    DataParallel ddp(model, group, {.shard = Shard::Weights, .optimizer = &optimizer});
    ddp.forward([&] { return model->forward(torch::ones({4, 256})).sum(); }).backward();
    optimizer.step();
    const auto layers = model->parameters();  // weight, bias, weight ...
    int64_t of_two_layers = 0;
    for (size_t i = 0; i < 4; ++i) {
      of_two_layers += is_here(layers[i]) ? 0 : static_cast<int64_t>(layers[i].nbytes());
    }
    const int64_t before = ddp.weight_bytes_received();
    torch::linear(torch::linear(torch::ones({4, 256}), layers[0], layers[1]), layers[2], layers[3]);
    EXPECT_GT(ddp.weight_bytes_received() - before, of_two_layers);  // the next weights are on their way
    group->barrier();
  });
}

TEST(ShardedWeights, ComeBackAndTrainOnWhenGathered) {
  on_ranks(3, [] {
    const auto group = init_process_group(quick());
    OddRun plain(group, {.hook = kInOrderOfRanks}), sharded(group, {.shard = Shard::Weights});
    plain.train(2);
    sharded.train(2);
    sharded.ddp->gather_weights();
    for (const auto& parameter : sharded.model->parameters()) {
      EXPECT_TRUE(is_here(parameter));
    }
    EXPECT_TRUE(same_bits(sharded.train(2), plain.train(2)));
  });
}

TEST(ShardedWeights, AreInNoMemoryOfOtherRanksOutsideOfOperators) {
  on_ranks(3, [] {
    const auto group = init_process_group(quick());
    OddRun run(group, {.shard = Shard::Weights, .window = Bytes(1)});
    for (const auto& item : run.model->named_parameters()) {
      if (item.value().numel() == 0) {
        continue;
      }
      auto holders = torch::full({1}, is_here(item.value()) ? 1 : 0, torch::kLong);
      group->all_reduce(holders);
      EXPECT_EQ(holders.item<int64_t>(), 1) << item.key();
      if (!is_here(item.value())) {
        EXPECT_THAT(error_of<c10::Error>([&] { item.value().data_ptr<float>(); }), HasSubstr("on another rank"));
      }
    }
    group->barrier();
  });
}

TEST(ShardedWeights, AreComparedBetweenGroups) {
  on_ranks(4, [] {
    const auto group = init_process_group(quick());
    OddRun run(group, {.shard = Shard::Weights, .shard_group = 2});
    run.train(1);
    run.ddp->check_replicas();
    if (group->rank() >= 2 && is_here(run.model->transposed)) {
      *run.model->transposed.data_ptr<float>() += 1;
    }
    EXPECT_THAT(
        error_of<DistributedError>([&] { run.ddp->check_replicas(); }),
        ::testing::AnyOf(
            HasSubstr("parameter 'transposed' is not the same on all ranks: rank 2 has other values than rank 0"),
            HasSubstr("parameter 'transposed' is not the same on all ranks: rank 3 has other values than rank 1")));
    group->barrier();
  });
}

std::map<std::string, Stateful> parts_of(OddRun& run) {
  return {{"model", stateful(run.model)}, {"optimizer", stateful(*run.optimizer)}};
}

std::map<std::string, torch::Tensor> named_weights(const OddRun& run) {
  std::map<std::string, torch::Tensor> tensors;
  for (const auto& item : run.model->named_parameters()) {
    tensors[item.key()] = item.value().detach();
  }
  return tensors;
}

void save(OddRun& run, const std::filesystem::path& folder) {
  run.group->save_together([&] {
    SnapshotStore(folder / "snapshots").save(2, parts_of(run));
    // Metadata of another size on each rank: the file has rank 0's.
    save_safetensors(folder / "model.safetensors", named_weights(run),
                     {{"rank", std::string(run.group->rank() * 20, 'x')}});
  });
}

void expect_one_snapshot(int ranks, int shard_group) {
  on_ranks(ranks, [=] {
    const std::filesystem::path folder = testing::shared_folder();
    const auto group = init_process_group(quick());
    const DataParallelOptions in_shards{.shard = Shard::Weights, .shard_group = shard_group};
    OddRun plain(group, {.hook = kInOrderOfRanks}), sharded(group, in_shards);
    plain.train(2);
    sharded.train(2);
    save(sharded, folder);
    EXPECT_EQ(SnapshotStore(folder / "snapshots").inspect().at(0).damage, "");
    EXPECT_EQ(read_safetensors_metadata(folder / "model.safetensors").at("rank"), "");
    if (group->rank() == 0) {  // one rank alone
      save_safetensors(folder / "whole.safetensors", named_weights(plain), {{"rank", ""}});
      EXPECT_EQ(detail::FileSystem::real().read_file(folder / "whole.safetensors"),
                detail::FileSystem::real().read_file(folder / "model.safetensors"));
    }
    const auto saved = clones_of(plain.model->parameters());
    for (const auto& [name, tensor] : load_safetensors(folder / "model.safetensors")) {
      EXPECT_TRUE(same_bits(tensor, plain.model->named_parameters()[name])) << name;
    }
    OddRun again(group, in_shards);
    EXPECT_EQ(SnapshotStore(folder / "snapshots").load_latest(parts_of(again)), 2);
    const auto next = plain.train(2);
    EXPECT_TRUE(same_bits(sharded.train(2), next));
    EXPECT_TRUE(same_bits(again.train(2), next));
    if (group->rank() < 2) {
      ProcessGroupOptions of_two = quick();
      of_two.store = "file://" + (folder / "store").string();
      of_two.rank = group->rank();
      of_two.size = 2;
      OddRun two(init_process_group(of_two), {.shard = Shard::Weights});
      EXPECT_EQ(SnapshotStore(folder / "snapshots").load_latest(parts_of(two)), 2);
      EXPECT_TRUE(same_bits(clones_of(two.model->parameters()), saved));
      two.train(1);
    }
    group->barrier();
  });
}

TEST(ShardedWeights, AreSavedInOneSnapshotThatAnyNumberOfRanksLoads) { expect_one_snapshot(3, 0); }
TEST(ShardedWeights, AreSavedInOneSnapshotByTwoGroups) { expect_one_snapshot(4, 2); }

TEST(ShardedWeights, AreSavedWithTheStateByAllRanksWithoutMemoryAndTraffic) {
  on_ranks(2, [] {
    const std::filesystem::path folder = testing::shared_folder();
    const auto group = init_process_group(quick());
    auto model = deep(), whole = deep(), loaded = deep();
    ShardedOptimizer optimizer(model->parameters(), group, kAdamW);
    DataParallel ddp(model, group, {.shard = Shard::Weights, .optimizer = &optimizer});
    const auto whole_optimizer = kAdamW({torch::optim::OptimizerParamGroup(whole->parameters())});
    const auto loaded_optimizer = kAdamW({torch::optim::OptimizerParamGroup(loaded->parameters())});
    ddp.forward([&] { return model->forward(torch::ones({4, 256})).sum(); }).backward();
    optimizer.step();
    whole->forward(torch::ones({4, 256})).sum().backward();
    whole_optimizer->step();
    const auto sent = [&] { return group->traffic().broadcast + group->traffic().all_gather; };
    const auto sent_before = sent();
    const auto received_before = ddp.weight_bytes_received();
    {
      const MemoryLimit limit(torch::kCPU, Bytes(live_bytes(torch::kCPU).count() + kLayer));
      group->save_together(
          [&] { SnapshotStore(folder).save(1, {{"model", stateful(model)}, {"optimizer", stateful(optimizer)}}); });
    }
    EXPECT_LT(sent() - sent_before, kLayer);  // names and sizes
    EXPECT_EQ(ddp.weight_bytes_received(), received_before);
    SnapshotStore(folder).load_latest({{"model", stateful(loaded)}, {"optimizer", stateful(*loaded_optimizer)}});
    EXPECT_TRUE(same_bits(loaded->parameters(), whole->parameters()));
    EXPECT_TRUE(same_bits(loaded_optimizer->state_tensors(), whole_optimizer->state_tensors()));
    group->barrier();
  });
}

TEST(ShardedWeights, LeaveTheEarlierSnapshotIfARankCannotSave) {
  on_ranks(3, [] {
    const std::filesystem::path folder = testing::shared_folder();
    const auto group = init_process_group(quick());
    OddRun plain(group, {.hook = kInOrderOfRanks}), sharded(group, {.shard = Shard::Weights});
    SnapshotStore snapshots(folder / "snapshots");
    auto parts = parts_of(sharded);
    group->save_together([&] { snapshots.save(1, parts); });
    const auto expect_refused = [&](int failing, const std::string& reason) {
      const auto save = [&] { group->save_together([&] { snapshots.save(2, parts); }); };
      if (group->rank() == failing) {
        EXPECT_THAT(error_of<Error>(save), HasSubstr(reason));
      } else {
        EXPECT_THAT(error_of<DistributedError>(save), HasSubstr(fmt::format("rank {} failed", failing)));
      }
      group->barrier();
      EXPECT_EQ(snapshots.latest(), 1);
      EXPECT_EQ(detail::FileSystem::real().list(folder / "snapshots").size(), 1U);
    };
    for (int failing = 0; failing < 3; ++failing) {
      parts["z"] = {[&] {
                      if (group->rank() == failing) {
                        throw Error("no state");
                      }
                      return StateDict();
                    },
                    {}};
      expect_refused(failing, "no state");
    }
    parts["z"] = {[&] {
                    StateDict state;
                    state.set("tensor", torch::ones({group->rank() == 2 ? 3 : 2}));
                    return state;
                  },
                  {}};
    expect_refused(2, "this rank has other tensors than rank 0");
    EXPECT_TRUE(same_bits(sharded.train(2), plain.train(2)));
  });
}

// `save` writes two files. The exchanges of the ranks stay in step, so the training goes on.
TEST(ShardedWeights, GoOnWhereverTheSaveOfARankFails) {
  on_ranks(3, [] {
    const std::filesystem::path folder = testing::shared_folder();
    const auto group = init_process_group(quick());
    OddRun plain(group, {.hook = kInOrderOfRanks}), sharded(group, {.shard = Shard::Weights});
    for (int failing = 0; failing < 3; ++failing) {
      for (int place = 0; place < 3; ++place) {
        const auto fail_at = [&](int now) {
          if (group->rank() == failing && place == now) {
            throw Error("the disk is full");
          }
        };
        const auto save = [&] {
          group->save_together([&] {
            fail_at(0);
            save_safetensors(folder / "first", named_weights(sharded));
            fail_at(1);
            save_safetensors(folder / "second", named_weights(sharded));
            fail_at(2);
          });
        };
        EXPECT_THROW(save(), Error);
      }
    }
    EXPECT_TRUE(same_bits(sharded.train(2), plain.train(2)));
  });
}

// Calls `save` on all ranks. The call fails on rank `failing` only: all ranks save or none, and each snapshot in the
// folder is whole. Returns the step of the newest snapshot.
int64_t expect_saved_by_all_or_none(ProcessGroup& group, int failing, const std::filesystem::path& folder,
                                    const std::function<void()>& save) {
  std::string error;
  try {
    save();
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  EXPECT_TRUE(testing::is_same_on_all(group, error.empty() ? 1 : 0)) << error;
  if (!error.empty() && group.rank() != failing) {
    EXPECT_THAT(error, HasSubstr(fmt::format("rank {} failed", failing)));
  }
  for (const auto& snapshot : SnapshotStore(folder).inspect()) {
    EXPECT_EQ(snapshot.damage, "");
  }
  group.barrier();
  return SnapshotStore(folder).latest().value();
}

TEST(ShardedWeights, AreSavedByAllRanksOrByNoneWhicheverOperationOnFilesOfARankFails) {
  on_ranks(3, [] {
    const std::filesystem::path folder = testing::shared_folder();
    const auto group = init_process_group(quick());
    OddRun plain(group, {.hook = kInOrderOfRanks}), sharded(group, {.shard = Shard::Weights});
    plain.train(1);
    sharded.train(1);
    const auto parts = parts_of(sharded);
    int64_t step = 0, before = 0;
    group->save_together([&] { SnapshotStore(folder).save(0, parts); });
    for (int failing = 0; failing < 3; ++failing) {
      int64_t failures = 0;
      for (bool has_failed = true; has_failed; failures += has_failed ? 1 : 0) {
        testing::FailingFileSystem files({.fail_at = group->rank() == failing ? failures + 1 : 0});
        SnapshotStore snapshots(folder, {}, files);
        const int64_t latest = expect_saved_by_all_or_none(
            *group, failing, folder, [&] { group->save_together([&] { snapshots.save(++step, parts); }); });
        EXPECT_TRUE(latest == before || latest == step);
        before = latest;
        has_failed = testing::is_true_on_any(*group, group->rank() == failing && files.operations() > failures);
      }
      EXPECT_GE(failures, failing == 0 ? 10 : 2);  // two files, and rank 0 makes and names folders
    }
    OddRun again(group, {.shard = Shard::Weights});
    EXPECT_EQ(SnapshotStore(folder).load_latest(parts_of(again)), step);
    const auto expected = plain.train(2);
    EXPECT_TRUE(same_bits(again.train(2), expected));
    EXPECT_TRUE(same_bits(sharded.train(2), expected));
  });
}

TEST(ShardedWeights, AreSavedByAllRanksOrByNoneWhicheverAllocationOfARankFails) {
  on_ranks(2, [] {
    const std::filesystem::path folder = testing::shared_folder();
    const auto group = init_process_group(quick());
    OddRun plain(group, {}), sharded(group, {.shard = Shard::Weights});
    plain.train(1);
    sharded.train(1);
    const auto parts = parts_of(sharded);
    int64_t step = 0, before = 0;
    group->save_together([&] { SnapshotStore(folder).save(0, parts); });
    for_each_failing_allocation(testing::on_rank_1(*group), [&](testing::FailingAllocation& allocation) {
      const int64_t latest = expect_saved_by_all_or_none(*group, 1, folder, [&] {
        allocation.arm();
        const auto disarm = c10::make_scope_exit([&] { allocation.disarm(); });
        group->save_together([&] { SnapshotStore(folder).save(++step, parts); });
      });
      EXPECT_TRUE(latest == before || latest == step);
      before = latest;
    });
    EXPECT_TRUE(same_bits(sharded.train(2), plain.train(2)));
  });
}

// As on machines without a shared disk.
TEST(ShardedWeights, AreNotSavedWhereARankDoesNotSeeTheFolder) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    OddRun sharded(group, {.shard = Shard::Weights});
    const std::filesystem::path own = testing::shared_folder() / std::to_string(group->rank());
    std::filesystem::create_directories(own);
    const auto save = [&] { save_safetensors(own / "model", named_weights(sharded)); };
    EXPECT_THROW(group->save_together(save), Error);
    EXPECT_TRUE(std::filesystem::is_empty(own));
  });
}

// A window of all weights brings each weight once in a step. A window without room brings each weight to each operator:
// a layer's forward takes weight and bias, and a layer's backward takes the weight, except in the first layer.
TEST(ShardedWeights, SendAsManyBytesAsTheWindowSays) {
  on_ranks(3, [] {
    const auto group = init_process_group(quick());
    for (const bool has_room : {true, false}) {
      auto model = make_mlp({16, 32, 48, 32, 16});
      ShardedOptimizer optimizer(model->parameters(), group, kAdamW);
      DataParallel ddp(
          model, group,
          {.shard = Shard::Weights, .window = has_room ? Bytes(1 << 20) : Bytes(1), .optimizer = &optimizer});
      int64_t all = 0, in_backward = 0;
      for (const auto& item : model->named_parameters()) {
        const int64_t bytes = is_here(item.value()) ? 0 : static_cast<int64_t>(item.value().nbytes());
        all += bytes;
        in_backward += item.value().dim() == 2 && item.key() != "0.weight" ? bytes : 0;
      }
      for (int step = 1; step <= 2; ++step) {
        optimizer.zero_grad();
        for (int i = 0; i < 3; ++i) {
          std::optional<NoSync> quiet;
          if (i < 2) {
            quiet.emplace(ddp);
          }
          ddp.forward([&] { return model->forward(torch::ones({2, 16})).square().sum(); }).backward();
        }
        optimizer.step();
        EXPECT_EQ(ddp.weight_bytes_received(), step * (has_room ? all : 3 * (all + in_backward)));
      }
    }
  });
}

TEST(ShardedGradients, AreOnOneRankEach) {
  on_ranks(3, [] {
    const auto group = init_process_group(quick());
    OddRun run(group, {.shard = Shard::Gradients});
    run.backward(1, group->rank() == 1);
    for (const auto& item : run.model->named_parameters()) {
      const bool is_trained = item.value().requires_grad() && item.key().find("none") != 0;
      auto holders = torch::full({1}, item.value().grad().defined() ? 1 : 0, torch::kLong);
      group->all_reduce(holders);
      EXPECT_EQ(holders.item<int64_t>(), is_trained ? 1 : 0) << item.key();
    }
  });
}

void expect_a_sum_to_count_once(int ranks, int shard_group) {
  on_ranks(ranks, [=] {
    const auto group = init_process_group(quick());
    for (const auto reduction : {Reduction::Mean, Reduction::Sum}) {
      OddRun plain(group, {.reduction = reduction});
      OddRun sharded(group, {.reduction = reduction, .shard = Shard::Gradients, .shard_group = shard_group});
      for (OddRun* run : {&plain, &sharded}) {
        run->backward(1, true);
        run->backward(2, true);
      }
      for (const auto& item : sharded.model->named_parameters()) {
        const auto gradient = item.value().grad(), expected = plain.model->named_parameters()[item.key()].grad();
        auto holders = torch::full({1}, gradient.defined() ? 1 : 0, torch::kLong);
        group->all_reduce(holders);
        const int groups = shard_group == 0 ? 1 : ranks / shard_group;
        EXPECT_EQ(holders.item<int64_t>(), expected.defined() ? groups : 0) << item.key();
        EXPECT_TRUE(!gradient.defined() || torch::allclose(gradient, expected, 1e-4, 1e-6)) << item.key();
      }
    }
  });
}

TEST(ShardedGradients, CountASumOnceThatALaterPassAddsTo) { expect_a_sum_to_count_once(3, 0); }
TEST(ShardedGradients, CountASumOnceThatALaterPassAddsToInTwoGroups) { expect_a_sum_to_count_once(4, 2); }
TEST(ShardedGradients, CountASumOnceThatALaterPassAddsToInThreeGroups) { expect_a_sum_to_count_once(6, 2); }

// A layer's gradient has 16 KiB. In backward each rank waits for the statistics of all ranks, and has room for few
// gradients on their way. A rank that waited for gradients of a rank that waits for statistics would wait until the
// timeout.
void expect_the_bits_with_sync_batch_norm(int ranks, int shard_group) {
  on_ranks(ranks, [=] {
    const auto group = init_process_group(quick());
    const auto train = [&](DataParallelOptions options) {
      torch::manual_seed(1);
      torch::nn::Sequential model;
      for (int i = 0; i < 4; ++i) {
        model->push_back(torch::nn::Linear(torch::nn::LinearOptions(64, 64).bias(false)));
        model->push_back(SyncBatchNorm(torch::nn::BatchNormOptions(64), group));
      }
      ShardedOptimizer optimizer(model->parameters(), group, kAdamW);
      options.optimizer = options.shard == Shard::None ? nullptr : &optimizer;
      DataParallel ddp(model, group, options);
      for (int step = 0; step < 3; ++step) {
        torch::manual_seed(static_cast<uint64_t>(10 * step + group->rank()));
        const auto items = torch::randn({5, 64});
        optimizer.zero_grad();
        ddp.forward([&] { return model->forward(items).sin().sum(); }).backward();
        optimizer.step();
      }
      return clones_of(model->parameters());
    };
    const auto expected = train({.hook = kInOrderOfRanks});
    EXPECT_TRUE(
        same_bits(train({.bucket = Bytes(52 << 10), .shard = Shard::Gradients, .shard_group = shard_group}), expected));
  });
}

TEST(ShardedGradients, GiveTheSameBitsWithSyncBatchNorm) { expect_the_bits_with_sync_batch_norm(2, 0); }
TEST(ShardedGradients, GiveTheSameBitsWithSyncBatchNormInGroupsOfOne) { expect_the_bits_with_sync_batch_norm(2, 1); }
TEST(ShardedGradients, GiveTheSameBitsWithSyncBatchNormInTwoGroups) { expect_the_bits_with_sync_batch_norm(4, 2); }

int64_t peak_of_backward(torch::nn::Sequential& model, DataParallel& ddp) {
  torch::Tensor loss = ddp.forward([&] { return model->forward(torch::ones({2, 256})).square().sum(); });
  const int64_t before = live_bytes(torch::kCPU).count();
  const detail::PeakWatch watch(torch::kCPU);
  loss.backward();
  return watch.peak() - before;
}

// 12 layers; `rank` sends so many of them.
void expect_the_memory_of_a_shard(int shard_group, int layers, const std::function<int(int rank)>& sent_by) {
  on_ranks(4, [=] {
    const auto group = init_process_group(quick());
    const int64_t level = live_bytes(torch::kCPU).count();
    auto model = deep();
    ShardedOptimizer optimizer(model->parameters(), group, kAdamW);
    DataParallel ddp(
        model, group,
        {.bucket = Bytes(kLayer), .shard = Shard::Gradients, .shard_group = shard_group, .optimizer = &optimizer});
    while (live_bytes(torch::kCPU).count() > level + 12 * kLayer + (64 << 10)) {
      std::this_thread::yield();  // Gloo's threads release what the constructor has sent a little later
    }
    const int64_t peak = peak_of_backward(model, ddp);
    // The rank's layers; two layers that are computed or sent, and the other ranks' parts of a layer.
    EXPECT_LE(peak, (layers + 2 + 1) * kLayer + (64 << 10));
    EXPECT_GE(peak, layers * kLayer);
    EXPECT_EQ(ddp.bytes_reduced(), sent_by(group->rank()) * kLayer);
  });
}

TEST(ShardedGradients, TakeTheMemoryOfAShardInBackward) {
  expect_the_memory_of_a_shard(0, 3, [](int) { return 9; });  // what others own
}
// What the other rank of the group owns, and for each owned layer the sum of the first group, or of both.
TEST(ShardedGradients, TakeTheMemoryOfAShardInBackwardInTwoGroups) {
  expect_the_memory_of_a_shard(2, 6, [](int) { return 6 + 6; });
}
TEST(ShardedGradients, AreSentTwiceByTheFirstOfManyGroups) {
  expect_the_memory_of_a_shard(1, 12, [](int rank) { return rank == 2 || rank == 3 ? 12 : 24; });
}

// 24 layers of 256 KiB, which no rank has room for.
TEST(ShardedWeights, TrainAModelThatIsLargerThanTheMemoryOfEachRank) {
  on_ranks(4, [] {
    const auto group = init_process_group(quick());
    const std::vector<int64_t> sizes(25, 256);
    const auto make_sgd = [](const auto& groups) { return std::make_unique<SGD>(groups, SGDOptions{.lr = 0.01}); };
    std::vector<torch::Tensor> expected;
    {
      auto model = make_mlp(sizes);
      ShardedOptimizer optimizer(model->parameters(), group, make_sgd);
      DataParallel ddp(model, group, {.hook = kInOrderOfRanks});
      for (int i = 0; i < 3; ++i) {
        optimizer.zero_grad();
        ddp.forward([&] { return model->forward(torch::ones({2, 256})).square().sum(); }).backward();
        optimizer.step();
      }
      for (const auto& parameter : model->parameters()) {
        expected.push_back(parameter.detach().square().sum());
      }
    }
    const testing::TemporaryFolder folder;
    torch::nn::Sequential model;
    {
      const TensorsInFile files(folder.path());
      model = make_mlp(sizes);
    }
    const MemoryLimit limit(torch::kCPU, Bytes(live_bytes(torch::kCPU).count() + 20 * kLayer));
    ShardedOptimizer optimizer(model->parameters(), group, make_sgd);
    DataParallel ddp(
        model, group,
        {.bucket = Bytes(kLayer), .shard = Shard::Weights, .window = Bytes(2 * kLayer), .optimizer = &optimizer});
    for (int i = 0; i < 3; ++i) {
      optimizer.zero_grad();
      ddp.forward([&] { return model->forward(torch::ones({2, 256})).square().sum(); }).backward();
      optimizer.step();
    }
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(same_bits(model->parameters()[i].detach().square().sum(), expected[i]));
    }
    group->barrier();
  });
}

TEST(Shards, RefuseWhatCannotWork) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    auto model = tiny_model();
    ShardedOptimizer optimizer(model->parameters(), group, kAdamW);
    const auto error_with = [&](const DataParallelOptions& options) {
      return error_of<ConfigError>([&] { DataParallel(model, group, options); });
    };
    EXPECT_THAT(error_with({.shard = Shard::Gradients}), HasSubstr("ShardedOptimizer as `optimizer`"));
    EXPECT_THAT(error_with({.shard = Shard::Gradients, .shard_group = 3, .optimizer = &optimizer}),
                HasSubstr("shard_group is 3, of 2 ranks; give a divisor"));
    EXPECT_THAT(error_with({.shard_group = 1}), HasSubstr("shard_group is 1"));
    EXPECT_THAT(error_with({.hook = float16_hook(), .shard = Shard::Gradients, .optimizer = &optimizer}),
                HasSubstr("neither hook"));
    testing::set_gradients(model->parameters(), 1);
    optimizer.step();
    EXPECT_THAT(error_with({.shard = Shard::Gradients, .optimizer = &optimizer}), HasSubstr("has a state already"));
  });
}

TEST(Shards, RefuseAnOptimizerThatCannotUpdateTheModelOnAllRanks) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    auto model = tiny_model();
    ShardedOptimizer all(model->parameters(), group, kAdamW), lacking({model->parameters()[0]}, group, kAdamW);
    const auto error_with = [&](ShardedOptimizer* optimizer) {
      return error_of<ConfigError>(
          [&] { DataParallel(model, group, {.shard = Shard::Gradients, .optimizer = optimizer}); });
    };
    EXPECT_THAT(error_with(group->rank() == 1 ? nullptr : &all), HasSubstr("on every rank"));
    EXPECT_THAT(error_with(&lacking), HasSubstr("lacks the trained parameter"));
    DataParallel ddp(model, group, {.shard = Shard::Gradients, .optimizer = &all});
    EXPECT_THAT(error_with(&all), HasSubstr("already follows another"));
    AdamW other(model->parameters(), AdamWOptions{});
    EXPECT_THAT(error_of<ConfigError>([&] { Stepper(model, other, {.ranks = {.data_parallel = &ddp}}); }),
                HasSubstr("give that optimizer"));
  });
}

TEST(ShardedWeights, HaveNewVersionsOnAllRanksAfterAnUpdate) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    OddRun run(group, {.shard = Shard::Weights});
    const auto before = run.model->transposed._version();
    run.train(1);
    EXPECT_GT(run.model->transposed._version(), before);
  });
}

struct StepperRun {
  StepperRun(const std::shared_ptr<ProcessGroup>& with, Shard shard, StepperOptions options = {}, int shard_group = 0)
      : group(with) {
    optimizer.emplace(model->parameters(), group, kAdamW);
    ddp.emplace(model, group,
                DataParallelOptions{.hook = shard == Shard::None ? kInOrderOfRanks : CommHook(),
                                    .shard = shard,
                                    .shard_group = shard_group,
                                    .optimizer = shard == Shard::None ? nullptr : &*optimizer});
    options.ranks.data_parallel = &*ddp;
    stepper.emplace(model, *optimizer, options);
  }
  // Rank 2 has no items in every other step.
  StepResult step(int number, const std::function<void()>& in_backward = {}) {
    const int64_t items = group->rank() == 2 && number % 2 == 1 ? 0 : 5 + group->rank();
    const Batch batch = tiny_batch(items, static_cast<uint64_t>(10 * number + group->rank()));
    if (before_step) {
      before_step();
    }
    return stepper->step(batch, [&](const Batch& micro) {
      torch::Tensor hidden = micro[0];
      for (auto layer = model->begin(); layer != model->end(); ++layer) {
        hidden = layer->forward(hidden);
        if (in_backward && layer - model->begin() == 2) {  // when some gradients are sent
          hidden.register_hook([&](const torch::Tensor& gradient) {
            in_backward();
            return gradient;
          });
        }
      }
      return squared_error(hidden, micro[1]);
    });
  }

  std::function<void()> before_step;
  std::shared_ptr<ProcessGroup> group;
  torch::nn::Sequential model = tiny_model();
  std::optional<ShardedOptimizer> optimizer;
  std::optional<DataParallel> ddp;
  std::optional<Stepper> stepper;
};

void expect_the_bits_in_a_stepper(Shard shard, int ranks = 3, int shard_group = 0) {
  on_ranks(ranks, [&] {
    const auto group = init_process_group(quick());
    for (const int64_t micro_batch : {0, 2}) {
      const StepperOptions options{.micro_batch = micro_batch, .clip_norm = 0.3};
      StepperRun plain(group, Shard::None, options), sharded(group, shard, options, shard_group);
      for (int i = 0; i < 5; ++i) {
        const StepResult expected = plain.step(i), result = sharded.step(i);
        EXPECT_EQ(result.grad_norm(), expected.grad_norm());
        EXPECT_EQ(result.loss(), expected.loss());
      }
      EXPECT_TRUE(same_bits(clones_of(sharded.model->parameters()), clones_of(plain.model->parameters())));
      group->barrier();
    }
  });
}

TEST(ShardedGradients, GiveTheSameBitsInAStepper) { expect_the_bits_in_a_stepper(Shard::Gradients); }
TEST(ShardedWeights, GiveTheSameBitsInAStepper) { expect_the_bits_in_a_stepper(Shard::Weights); }
TEST(ShardedGradients, GiveTheSameBitsInAStepperOfTwoGroups) { expect_the_bits_in_a_stepper(Shard::Gradients, 4, 2); }
TEST(ShardedWeights, GiveTheSameBitsInAStepperOfTwoGroups) { expect_the_bits_in_a_stepper(Shard::Weights, 4, 2); }

TEST(ShardedGradients, GiveTheSameBitsWithinABudget) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    StepperRun plain(group, Shard::None);
    const Bytes budget(live_bytes(torch::kCPU).count() + (1 << 20));
    StepperRun sharded(group, Shard::Gradients, {.budget = {.memory = budget}});
    for (int i = 0; i < 3; ++i) {
      plain.step(i);
      const StepResult result = sharded.step(i);
      EXPECT_LE(result.peak_bytes, budget.count());
    }
    EXPECT_TRUE(sharded.stepper->plan().has_value());
    EXPECT_TRUE(same_bits(clones_of(sharded.model->parameters()), clones_of(plain.model->parameters())));
  });
}

// 12 layers of 64 KiB, of which the first `frozen` are frozen. Gradients take 64 KiB a layer that is trained, and with
// 512 items each result is 256 KiB.
struct WideRun {
  static constexpr int64_t kWidth = 128, kItems = 512;

  WideRun(const std::shared_ptr<ProcessGroup>& with, Shard shard, StepperOptions options, int frozen = 0,
          int shard_group = 0)
      : group(with), model(make_mlp(std::vector<int64_t>(13, kWidth), /*p=*/0.1)) {
    for (int i = 0; i < frozen; ++i) {
      for (auto& parameter : model[static_cast<size_t>(3 * i)]->parameters()) {
        parameter.set_requires_grad(false);
      }
    }
    optimizer.emplace(model->parameters(), group, kAdamW);
    ddp.emplace(model, group,
                DataParallelOptions{.bucket = Bytes(64 << 10),
                                    .hook = shard == Shard::None ? kInOrderOfRanks : CommHook(),
                                    .shard = shard,
                                    .shard_group = shard_group,
                                    .optimizer = shard == Shard::None ? nullptr : &*optimizer});
    options.ranks.data_parallel = &*ddp;
    stepper.emplace(model, *optimizer, options);
  }
  StepResult step(int number, int64_t items = kItems) {
    torch::manual_seed(static_cast<uint64_t>(10 * number + group->rank()));
    return stepper->step({torch::randn({items, kWidth})}, [&](const Batch& micro) {
      return Loss::sum(model->forward(micro[0]).square().sum(), micro[0].numel());
    });
  }
  // In steps from here on.
  void cut_into(int64_t micro_batch) {
    stepper.emplace(model, *optimizer, StepperOptions{.micro_batch = micro_batch, .ranks = {.data_parallel = &*ddp}});
  }
  bool has_all_weights() const { return std::ranges::all_of(model->parameters(), is_here); }

  std::shared_ptr<ProcessGroup> group;
  torch::nn::Sequential model;
  std::optional<ShardedOptimizer> optimizer;
  std::optional<DataParallel> ddp;
  std::optional<Stepper> stepper;
};

// Trains under `budget` bytes above the bytes alive now, and without a budget in micro-batches of the same size.
void expect_the_bits_within(const std::shared_ptr<ProcessGroup>& group, Shard shard, int64_t budget, bool in_shards,
                            int frozen = 0, int64_t batch = WideRun::kItems, int shard_group = 0) {
  const int64_t bytes = live_bytes(torch::kCPU).count() + budget;
  std::vector<torch::Tensor> within;
  std::vector<int64_t> items;  // of each step: a plan made again may cut the batch otherwise
  {
    WideRun run(group, shard, {.budget = {.memory = Bytes(bytes)}}, frozen, shard_group);
    for (int i = 0; i < 3; ++i) {
      const StepResult result = run.step(i, batch);
      const StepPlan plan = run.stepper->plan().value();
      EXPECT_LE(result.peak_bytes, plan.choice.peak_bytes + plan.spare_bytes);
      EXPECT_LE(plan.choice.peak_bytes + plan.spare_bytes, bytes);
      EXPECT_EQ(result.step_downs, 0);
      items.push_back(plan.choice.items);
      EXPECT_EQ(result.plan_deviation, "");
      EXPECT_EQ(plan.bytes.weights.outside > 0, in_shards);
      EXPECT_THAT(plan.explain(), HasSubstr(in_shards ? "its share of the weights, the gradients"
                                                      : "all weights, and its share of the gradients"));
      EXPECT_EQ(plan.explain().find("An update brings") == std::string::npos, in_shards);
      EXPECT_EQ(plan.explain().find("in each of 2 groups") != std::string::npos, shard_group == 2);
      EXPECT_THAT(plan.explain(), HasSubstr(fmt::format("sends {} of gradients to", Bytes(result.bytes_sent).str())));
      EXPECT_EQ(plan.explain().find("again for each forward") != std::string::npos, in_shards);
    }
    EXPECT_EQ(run.has_all_weights(), !in_shards);
    within = clones_of(run.model->parameters());
    group->barrier();
  }
  WideRun plain(group, Shard::None, {}, frozen);
  for (int i = 0; i < 3; ++i) {
    plain.cut_into(items[static_cast<size_t>(i)]);
    plain.step(i, batch);
  }
  EXPECT_TRUE(same_bits(within, clones_of(plain.model->parameters())));
}

TEST(ShardedWeights, GiveTheSameBitsWithinABudget) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    for (const int64_t budget : {16 << 20, 4 << 20, 3 << 20}) {
      expect_the_bits_within(group, Shard::Weights, budget, /*in_shards=*/true);
    }
  });
}

TEST(ShardedWeights, AreChosenWhereNoPlanFitsOtherwise) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    expect_the_bits_within(group, Shard::Auto, 4 << 20, /*in_shards=*/false);
    expect_the_bits_within(group, Shard::Auto, 3 << 20, /*in_shards=*/true);
  });
}

TEST(ShardedWeights, GiveTheSameBitsWithinABudgetInTwoGroups) {
  on_ranks(4, [] {
    const auto group = init_process_group(quick());
    expect_the_bits_within(group, Shard::Auto, 6 << 20, /*in_shards=*/false, 0, 256, /*shard_group=*/2);
    expect_the_bits_within(group, Shard::Auto, 3 << 20, /*in_shards=*/true, 0, 256, /*shard_group=*/2);
  });
}

TEST(ShardedWeights, AreChosenWhereTheModelAloneIsLargerThanTheBudget) {
  on_ranks(4, [] {
    const auto group = init_process_group(quick());
    constexpr int64_t kModel = 12 * 4 * WideRun::kWidth * (WideRun::kWidth + 1);
    expect_the_bits_within(group, Shard::Auto, kModel - 1, /*in_shards=*/true, /*frozen=*/11, /*batch=*/16);
  });
}

TEST(ShardedWeights, AreChosenByAllRanksWhereOneRankHasNoRoom) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const Bytes budget(live_bytes(torch::kCPU).count() + (7 << 19));
    const auto items_of = [&](int step) { return step < 2 ? 8 : step == 2 && group->rank() == 0 ? 0 : 16; };
    torch::Tensor other;
    WideRun run(group, Shard::Auto, {.budget = {.memory = budget}});
    for (int i = 0; i < 4; ++i) {
      if (i == 2 && group->rank() == 1) {
        other = torch::ones({400 << 8});
      }
      run.step(i, items_of(i));
      EXPECT_EQ(run.has_all_weights(), i < 2);
    }
    WideRun plain(group, Shard::None, {});
    for (int i = 0; i < 4; ++i) {
      plain.step(i, items_of(i));
    }
    EXPECT_TRUE(same_bits(clones_of(run.model->parameters()), clones_of(plain.model->parameters())));
    group->barrier();
  });
}

TEST(ShardedWeights, AreInShardsAgainInARunThatGoesOn) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const int64_t before = live_bytes(torch::kCPU).count();
    StateDict state;
    int64_t items = 0;
    {
      WideRun run(group, Shard::Auto, {.budget = {.memory = Bytes(before + (3 << 20))}});
      run.step(0);
      ASSERT_FALSE(run.has_all_weights());
      items = run.stepper->plan()->choice.items;
      state = run.stepper->state_dict();
      run.ddp->gather_weights();
      EXPECT_TRUE(run.has_all_weights());
    }
    WideRun run(group, Shard::Auto, {.budget = {.memory = Bytes(before + (3 << 20))}});
    run.stepper->load_state_dict(state);
    run.step(1, /*items=*/8);  // there is a plan for so few items without shards
    EXPECT_FALSE(run.has_all_weights());
    run.step(0);
    EXPECT_EQ(run.stepper->plan()->choice.items, items);
    group->barrier();
  });
}

TEST(ShardedWeights, TellAMeterTheBytesInMemory) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    WideRun run(group, Shard::Weights, {});
    MemoryMeter meter(torch::kCPU);
    meter.attach(*run.model);
    int64_t here = 0;
    for (const auto& parameter : run.model->parameters()) {
      here += is_here(parameter) ? static_cast<int64_t>(parameter.nbytes()) : 0;
    }
    EXPECT_EQ(meter.report().parameters, here);
    group->barrier();
  });
}

TEST(Shards, AreNotMentionedInAGroupOfOne) {
  const auto group = init_process_group({.rank = 0, .size = 1});
  WideRun run(group, Shard::Auto, {.budget = {.memory = Bytes(live_bytes(torch::kCPU).count() + (16 << 20))}},
              /*frozen=*/0, /*shard_group=*/2);
  run.step(0);
  EXPECT_THAT(run.stepper->plan()->explain(), ::testing::Not(HasSubstr("ranks")));
}

TEST(ShardedWeights, AreRefusedIfTheyHaveNoPlanEither) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    WideRun run(group, Shard::Auto, {.budget = {.memory = Bytes(live_bytes(torch::kCPU).count() + (2 << 20))}});
    const auto error = error_of<BudgetExceeded>([&] { run.step(0); });
    EXPECT_THAT(error, HasSubstr("no plan was found"));
    EXPECT_THAT(error, HasSubstr("would do"));
    EXPECT_FALSE(run.has_all_weights());
    const auto error_in = [&](Shard shard) {
      return error_of<BudgetExceeded>([&] { WideRun(group, shard, {.budget = {.memory = Bytes(64 << 10)}}); });
    };
    EXPECT_THAT(error_in(Shard::Auto), HasSubstr("give a larger budget, or start more ranks"));
    EXPECT_THAT(error_in(Shard::Gradients), HasSubstr("give a larger budget, or keep the weights in shards"));
    group->barrier();
  });
}

TEST(Shards, RefuseMastersAndTheGuard) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    const auto error = error_of<ConfigError>([&] {
      StepperRun(group, Shard::Gradients,
                 {.precision = Precision::BFloat16, .sixteen_bit = {.guard = {.patience = 3}}});
    });
    EXPECT_THAT(error, HasSubstr("sums of all gradients"));
  });
}

TEST(ShardedWeights, StayWholeOnAllRanksIfOneCannotStartThreads) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    if (group->rank() == 1) {
      group->impl().make_group = [make = group->impl().make_group](int ranks) {
        auto made = make(ranks);
        pthread_attr_t attributes;
        ::pthread_attr_init(&attributes);
        ::pthread_attr_setstacksize(&attributes, size_t{1} << 48);  // more than there are addresses
        ::pthread_setattr_default_np(&attributes);
        return made;
      };
    }
    auto model = tiny_model();
    ShardedOptimizer optimizer(model->parameters(), group, kAdamW);
    const auto error =
        error_of<Error>([&] { DataParallel(model, group, {.shard = Shard::Weights, .optimizer = &optimizer}); });
    EXPECT_THAT(error,
                HasSubstr(group->rank() == 1 ? "rank 1 cannot start the threads" : "rank 1 cannot start threads"));
    EXPECT_TRUE(std::ranges::all_of(model->parameters(), is_here));
  });
}

void expect_the_step_of_all_ranks_whichever_allocation_fails(int ranks, int shard_group) {
  on_ranks(ranks, [=] {
    const auto group = init_process_group(quick());
    StepperRun undisturbed(group, Shard::None), run(group, Shard::Weights, {}, shard_group);
    int number = 0;
    for_each_failing_allocation(testing::on_rank_1(*group), [&](testing::FailingAllocation& allocation) {
      bool is_made = true;
      run.before_step = [&] { allocation.arm(); };
      try {
        run.step(number);
      } catch (const std::exception&) {
        is_made = false;
      }
      allocation.disarm();
      run.before_step = {};
      ASSERT_TRUE(testing::is_same_on_all(*group, is_made ? 1 : 0));
      if (!is_made) {
        run.step(number);
      }
      undisturbed.step(number++);
      ASSERT_TRUE(same_bits(clones_of(run.model->parameters()), clones_of(undisturbed.model->parameters())));
      group->barrier();
    });
    EXPECT_GT(number, 20);
  });
}

TEST(ShardedWeights, AreAsBeforeTheStepWhicheverAllocationOfOneRankFails) {
  expect_the_step_of_all_ranks_whichever_allocation_fails(2, 0);
}
TEST(ShardedWeights, AreAsBeforeTheStepWhicheverAllocationOfOneRankFailsInTwoGroups) {
  expect_the_step_of_all_ranks_whichever_allocation_fails(4, 2);
}

TEST(ShardedGradients, AreDroppedByAllRanksIfOneFailsInBackward) {
  on_ranks(3, [] {
    const auto group = init_process_group(quick());
    StepperRun run(group, Shard::Gradients), undisturbed(group, Shard::None);
    run.step(0);
    undisturbed.step(0);
    const auto fail = [] { throw std::runtime_error("a bad picture"); };
    if (group->rank() == 1) {
      EXPECT_THAT(error_of<std::runtime_error>([&] { run.step(2, fail); }), HasSubstr("a bad picture"));
    } else {
      EXPECT_THAT(error_of<DistributedError>([&] { run.step(2); }), HasSubstr("rank 1 failed in this step"));
    }
    for (const auto& parameter : run.model->parameters()) {
      EXPECT_FALSE(parameter.grad().defined());
    }
    undisturbed.step(4);
    run.step(4);
    EXPECT_TRUE(same_bits(clones_of(run.model->parameters()), clones_of(undisturbed.model->parameters())));
  });
}

void expect_the_name_of_a_rank_that_dies_in_backward(Shard shard, int ranks = 3, int shard_group = 0) {
  on_ranks(ranks, [&] {
    const auto group = init_process_group(quick());
    StepperRun run(group, shard, {}, shard_group);
    run.step(0);
    if (group->rank() == 1) {
      run.step(2, [] { ::_exit(0); });
      ADD_FAILURE() << "rank 1 lives";
    } else {
      EXPECT_THAT(error_of<DistributedError>([&] { run.step(2); }), HasSubstr("rank 1 has died"));
    }
  });
}

TEST(ShardedGradients, EndAllRanksWithTheNameOfARankThatDiesInBackward) {
  expect_the_name_of_a_rank_that_dies_in_backward(Shard::Gradients);
}
TEST(ShardedWeights, EndAllRanksWithTheNameOfARankThatDiesInBackward) {
  expect_the_name_of_a_rank_that_dies_in_backward(Shard::Weights);
}
TEST(ShardedWeights, EndAllRanksOfTwoGroupsWithTheNameOfARankThatDiesInBackward) {
  expect_the_name_of_a_rank_that_dies_in_backward(Shard::Weights, 4, 2);
}

// Each of three ranks dies twice, at a random moment in a run that saves every other step.
TEST(ShardedWeights, EndAllRanksWithTheNameOfARankThatDiesAtAnyMoment) {
  for (int i = 0; i < 6; ++i) {
    const int milliseconds =
        testing::is_rank() ? std::atoi(std::getenv("DIES_AFTER")) : static_cast<int>(std::random_device()() % 300);
    const int dead = testing::is_rank() ? std::atoi(std::getenv("DIES")) : i % 3;
    SCOPED_TRACE(fmt::format("rank {} dies after {} ms", dead, milliseconds));
    const testing::TemporaryFolder folder;
    const detail::Environment variables{
        {"DIES", std::to_string(dead)}, {"DIES_AFTER", std::to_string(milliseconds)}, {"FOLDER", folder.path()}};
    on_ranks(3, std::vector(3, variables), testing::is_rank() ? 0 : testing::free_port(), [&] {
      const auto group = init_process_group(quick());
      StepperRun run(group, Shard::Weights, {.micro_batch = 2, .clip_norm = 0.3});
      run.step(0);
      if (group->rank() == dead) {
        std::thread([&] {
          std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
          ::_exit(0);
        }).detach();
      }
      const auto error = error_of<DistributedError>([&] {
        SnapshotStore snapshots(std::getenv("FOLDER"));
        for (int step = 1;; ++step) {
          run.step(step);
          if (step % 2 == 0) {
            group->save_together([&] {
              snapshots.save(step, {{"model", stateful(run.model)}, {"optimizer", stateful(*run.optimizer)}});
            });
          }
        }
      });
      EXPECT_THAT(error, HasSubstr(fmt::format("rank {} has died", dead)));
    });
    if (testing::is_rank()) {
      return;
    }
    for (const SnapshotStore::Snapshot& snapshot : SnapshotStore(folder.path()).inspect()) {
      EXPECT_EQ(snapshot.damage, "");
    }
  }
}

}  // namespace
}  // namespace snug::shards_test
