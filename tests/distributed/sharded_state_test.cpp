#include <memory>
#include <sstream>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/distributed/sharded_optimizer.h"
#include "snug/memory.h"
#include "snug/snapshot.h"
#include "tests/distributed/ranks.h"
#include "tests/support/optimizers.h"
#include "tests/support/tensors.h"

namespace snug::sharded_state_test {
namespace {

using testing::on_ranks;
using testing::quick;
using testing::same_bits;
using testing::set_gradients;
using testing::tensors_in;
using torch::optim::OptimizerParamGroup;

std::unique_ptr<FusedOptimizer> make_adamw(const std::vector<OptimizerParamGroup>& groups) {
  return std::make_unique<AdamW>(groups, AdamWOptions{.lr = 0.01, .weight_decay = 0.1});
}

TEST(ShardedOptimizer, SavesItsStateOfAllRanksWithoutTensorMemory) {
  on_ranks(3, [] {
    constexpr int64_t kLarge = 3 << 20;  // 12 MiB, and 24 of state
    const auto make = [] { return std::vector{torch::ones({kLarge}), torch::ones({7, 3}).t(), torch::ones({})}; };
    const auto a = make();
    const auto b = make();
    const auto whole = make_adamw({OptimizerParamGroup(a)});
    const auto group = init_process_group(quick());
    ShardedOptimizer sharded(b, group, make_adamw);
    for (const auto& [optimizer, parameters] :
         {std::pair<torch::optim::Optimizer*, std::vector<torch::Tensor>>(whole.get(), a), {&sharded, b}}) {
      set_gradients(parameters, 1);
      optimizer->step();
      optimizer->zero_grad();
    }
    SnapshotStore snapshots(testing::shared_folder());
    {
      const MemoryLimit limit(torch::kCPU, Bytes(live_bytes(torch::kCPU).count() + (6 << 20)));
      group->save_together([&] { snapshots.save(1, {{"optimizer", stateful(sharded)}}); });
    }
    std::ostringstream archive;
    EXPECT_THROW(group->save_together([&] { torch::save(sharded, archive); }), ConfigError);
    EXPECT_THROW(sharded.state_dict(), ConfigError);  // the state is in shares again
    const auto loaded = make_adamw({OptimizerParamGroup(a)});
    EXPECT_EQ(snapshots.load_latest({{"optimizer", stateful(*loaded)}}), 1);
    EXPECT_TRUE(same_bits(tensors_in(loaded->state_dict()), tensors_in(whole->state_dict())));
    EXPECT_EQ(snapshots.inspect().at(0).damage, "");
  });
}

}  // namespace
}  // namespace snug::sharded_state_test
