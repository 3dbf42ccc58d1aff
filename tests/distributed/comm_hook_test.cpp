#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/distributed/data_parallel.h"
#include "tests/distributed/ranks.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::comm_hook_test {
namespace {

using testing::bytes_of;
using testing::close_in_norm;
using testing::gradients_of;
using testing::on_ranks;
using testing::quick;
using testing::tiny_batch;
using testing::tiny_model;

void expect_half_the_bytes(const CommHook& hook, double bound) {
  on_ranks(2, [&] {
    const auto group = init_process_group(quick());
    const auto part = tiny_batch(12)[0].chunk(2)[static_cast<size_t>(group->rank())];
    auto exact = tiny_model();
    auto model = tiny_model();
    DataParallel exact_ddp(exact, group, {.bucket = Bytes(600)});
    DataParallel ddp(model, group, {.bucket = Bytes(600), .hook = hook});
    for (int step = 1; step <= 3; ++step) {
      exact->zero_grad();
      model->zero_grad();
      exact_ddp.forward([&] { return exact->forward(part).square().mean(); }).backward();
      ddp.forward([&] { return model->forward(part).square().mean(); }).backward();
      EXPECT_EQ(exact_ddp.bytes_reduced(), step * bytes_of(model->parameters()));
      EXPECT_EQ(2 * ddp.bytes_reduced(), exact_ddp.bytes_reduced());
      for (size_t i = 0; i < model->parameters().size(); ++i) {
        EXPECT_TRUE(close_in_norm(gradients_of(*model)[i], gradients_of(*exact)[i], bound));
      }
    }
  });
}

TEST(CommHook, Float16HalvesTheBytes) { expect_half_the_bytes(float16_hook(), 1e-3); }
TEST(CommHook, Bfloat16HalvesTheBytes) { expect_half_the_bytes(bfloat16_hook(), 8e-3); }

TEST(CommHook, MayBeAnyFunction) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    auto model = tiny_model();
    std::vector<std::string> calls;
    size_t parameters = 0;
    DataParallel ddp(model, group, {.bucket = Bytes(600), .hook = [&](const GradientBucket& bucket, ProcessGroup& g) {
                                      calls.push_back("start " + std::to_string(bucket.index));
                                      parameters += bucket.parameters.size();
                                      EXPECT_EQ(bucket.gradients.numel() * 4, bytes_of(bucket.parameters));
                                      return [&calls, bucket, wait = g.start_all_reduce(bucket.gradients)] {
                                        wait();
                                        calls.push_back("end " + std::to_string(bucket.index));
                                        bucket.gradients.fill_(7);
                                      };
                                    }});
    ddp.forward([&] { return model->forward(tiny_batch(4)[0]).square().mean(); }).backward();
    EXPECT_EQ(parameters, 6U);
    ASSERT_GE(calls.size(), 4U);
    EXPECT_EQ(calls.front(), "start 0");
    EXPECT_EQ(calls[calls.size() / 2], "end 0");
    for (const auto& gradient : gradients_of(*model)) {
      EXPECT_TRUE(torch::equal(gradient, torch::full_like(gradient, 7)));
    }
  });
}

}  // namespace
}  // namespace snug::comm_hook_test
