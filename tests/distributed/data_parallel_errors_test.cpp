#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/distributed/data_parallel.h"
#include "snug/sgd.h"
#include "snug/step_in_backward.h"
#include "tests/distributed/ranks.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::data_parallel_errors_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::on_ranks;
using testing::quick;
using testing::same_bits;
using testing::tiny_batch;
using testing::tiny_model;

torch::Tensor loss_of(torch::nn::Sequential& model) { return model->forward(tiny_batch(4)[0]).square().mean(); }

// Afterwards a right step must still be possible.
void expect_a_good_step(DataParallel& ddp, torch::nn::Sequential& model) {
  auto alone = tiny_model();
  loss_of(alone).backward();
  model->zero_grad();
  ddp.forward([&] { return loss_of(model); }).backward();
  for (size_t i = 0; i < model->parameters().size(); ++i) {
    EXPECT_TRUE(testing::close_in_norm(gradients_of(*model)[i], gradients_of(*alone)[i], 1e-6));
  }
}

TEST(DataParallelErrors, BackwardOutsideForward) {
  on_ranks(2, [] {
    auto model = tiny_model();
    DataParallel ddp(model, init_process_group(quick()));
    EXPECT_THAT(error_of<ConfigError>([&] { loss_of(model).backward(); }),
                AllOf(HasSubstr("did not start at what forward() returned"), HasSubstr("'5.bias'")));
    torch::Tensor inner;
    ddp.forward([&] {
      inner = loss_of(model);
      return inner.detach();
    });
    EXPECT_THAT(error_of<ConfigError>([&] { inner.backward(); }), HasSubstr("did not start at"));
    expect_a_good_step(ddp, model);
    EXPECT_THAT(error_of<ConfigError>([&] { loss_of(model).backward(); }), HasSubstr("did not start at"));
  });
}

TEST(DataParallelErrors, NoSyncAroundForwardOrBackwardAlone) {
  on_ranks(2, [] {
    auto model = tiny_model();
    DataParallel ddp(model, init_process_group(quick()));
    torch::Tensor loss;
    {
      const NoSync quiet(ddp);
      loss = ddp.forward([&] { return loss_of(model); });
    }
    EXPECT_THAT(error_of<ConfigError>([&] { loss.backward(); }),
                HasSubstr("forward() was called inside NoSync and backward() outside"));
    expect_a_good_step(ddp, model);
    loss = ddp.forward([&] { return loss_of(model); });
    {
      const NoSync quiet(ddp);
      EXPECT_THAT(error_of<ConfigError>([&] { loss.backward(); }),
                  HasSubstr("forward() was called outside NoSync and backward() inside"));
    }
    expect_a_good_step(ddp, model);
  });
}

TEST(DataParallelErrors, SecondBackwardAndForwardInsideForward) {
  on_ranks(2, [] {
    auto model = tiny_model();
    DataParallel ddp(model, init_process_group(quick()));
    const auto first = ddp.forward([&] { return loss_of(model); });
    const auto second = ddp.forward([&] { return loss_of(model); });
    first.backward();
    EXPECT_THAT(error_of<ConfigError>([&] { second.backward(); }), HasSubstr("a second backward pass"));
    expect_a_good_step(ddp, model);
    EXPECT_THAT(
        error_of<ConfigError>([&] { ddp.forward([&] { return ddp.forward([&] { return loss_of(model); }); }); }),
        HasSubstr("inside another forward()"));
    expect_a_good_step(ddp, model);
  });
}

// What every rank is told if `change` made rank 1's model another.
std::string error_after(const std::shared_ptr<ProcessGroup>& group,
                        const std::function<void(torch::nn::Sequential&, DataParallelOptions&)>& change) {
  auto model = tiny_model();
  DataParallelOptions options;
  if (group->rank() == 1) {
    change(model, options);
  }
  return error_of<ConfigError>([&] { DataParallel(model, group, options); });
}

TEST(DataParallelErrors, EveryRankSaysWhatDiffers) {
  on_ranks(3, [] {
    const auto group = init_process_group(quick());
    EXPECT_THAT(error_after(group, [](auto& model, auto&) { model = torch::nn::Sequential(torch::nn::Linear(6, 7)); }),
                AllOf(HasSubstr("rank 0 has parameter '0.weight': Float [16, 6], rank 1"),
                      HasSubstr("rank 1 has parameter '0.weight': Float [7, 6];")));
    EXPECT_THAT(error_after(group, [](auto& model, auto&) { model[3]->to(torch::kDouble); }),
                AllOf(HasSubstr("rank 0 has parameter '3.weight': Float [16, 16]"),
                      HasSubstr("rank 1 has parameter '3.weight': Double [16, 16]")));
    EXPECT_THAT(
        error_after(group, [](auto& model, auto&) { model->push_back(torch::nn::Linear(2, 2)); }),
        AllOf(HasSubstr("rank 0 has nothing more"), HasSubstr("rank 1 has parameter '6.weight': Float [2, 2]")));
    EXPECT_THAT(error_after(group, [](auto& model, auto&) { model[3]->parameters()[1].requires_grad_(false); }),
                AllOf(HasSubstr("'3.bias'"), HasSubstr("frozen")));
    EXPECT_THAT(error_after(group, [](auto&, auto& options) { options.bucket = Bytes(1000); }),
                HasSubstr("bucket = 1000"));
    auto model = tiny_model();
    DataParallel ddp(model, group);  // the group still works
    expect_a_good_step(ddp, model);
  });
}

// Where the others know that they are to look: when all change something, and before buckets are made anew.
TEST(DataParallelErrors, RanksThatFreezeOtherParameters) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    auto model = tiny_model();
    DataParallel ddp(model, group);
    const auto expect_error = [&](const char* name) {
      EXPECT_THAT(error_of<ConfigError>([&] { ddp.forward([&] { return loss_of(model); }); }),
                  AllOf(HasSubstr("ranks differ"), HasSubstr(name), HasSubstr("frozen")));
    };
    expect_a_good_step(ddp, model);
    model->parameters()[3].set_requires_grad(group->rank() == 0);
    expect_error("'3.bias'");
    model->parameters()[3].set_requires_grad(true);
    expect_a_good_step(ddp, model);
    expect_a_good_step(ddp, model);
    model->parameters()[static_cast<size_t>(group->rank())].set_requires_grad(false);
    expect_error("'0.weight'");
    model->parameters()[0].set_requires_grad(true);
    model->parameters()[1].set_requires_grad(true);
    expect_a_good_step(ddp, model);
    expect_a_good_step(ddp, model);
  });
}

TEST(DataParallelErrors, NoSyncWithAStaticGraph) {
  on_ranks(1, [] {
    auto model = tiny_model();
    DataParallel ddp(model, init_process_group(quick()), {.static_graph = true});
    {
      const NoSync quiet(ddp);
      EXPECT_THAT(error_of<ConfigError>([&] { ddp.forward([&] { return loss_of(model); }); }),
                  HasSubstr("static_graph"));
    }
    expect_a_good_step(ddp, model);
  });
}

TEST(DataParallelErrors, AnOptimizerThatStepsInBackward) {
  on_ranks(1, [] {
    auto model = tiny_model();
    DataParallel ddp(model, init_process_group(quick()));
    SGD optimizer(model->parameters(), {.lr = 0.1});
    {
      const StepInBackward in_backward(optimizer);
      EXPECT_THAT(error_of<ConfigError>([&] { ddp.forward([&] { return loss_of(model); }); }),
                  HasSubstr("'0.weight' is taken before"));
    }
    expect_a_good_step(ddp, model);
  });
}

TEST(DataParallelErrors, NothingToTrain) {
  on_ranks(1, [] {
    auto model = tiny_model();
    for (auto& parameter : model->parameters()) {
      parameter.requires_grad_(false);
    }
    EXPECT_THAT(error_of<ConfigError>([&] { DataParallel(model, init_process_group(quick())); }),
                HasSubstr("no parameter"));
  });
}

TEST(DataParallelErrors, ABufferThatIsNotDense) {
  on_ranks(2, [] {
    const auto group = init_process_group(quick());
    auto model = tiny_model();
    model->register_buffer("table", torch::eye(3).to_sparse());
    EXPECT_THAT(error_of<ConfigError>([&] { DataParallel(model, group); }),
                AllOf(HasSubstr("buffer 'table' is a Sparse"), HasSubstr("Float")));
    auto other = tiny_model();
    other->register_buffer("table", group->rank() == 0 ? torch::eye(3) : torch::eye(3).to_sparse());
    EXPECT_THAT(error_of<ConfigError>([&] { DataParallel(other, group); }),
                AllOf(HasSubstr("rank 0 has buffer 'table': Float [3, 3],"), HasSubstr("[3, 3], not dense")));
    EXPECT_THAT(error_of<ConfigError>([&] { group->broadcast({torch::eye(3).to_sparse()}); }), HasSubstr("Sparse"));
  });
}

TEST(DataParallelErrors, ASparseGradient) {
  on_ranks(2, [] {
    auto model = tiny_model();
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 6).sparse(true));
    model->register_module("table", table);
    DataParallel ddp(model, init_process_group(quick()));
    const auto loss = [&] { return model->forward(table->forward(torch::arange(4))).sum(); };
    const auto names_it = AllOf(HasSubstr("the gradient of parameter 'table.weight' is Sparse"), HasSubstr("dense"));
    {
      const NoSync quiet(ddp);
      EXPECT_THAT(error_of<ConfigError>([&] { ddp.forward(loss).backward(); }), names_it);
    }
    EXPECT_THAT(error_of<ConfigError>([&] { ddp.forward(loss).backward(); }), names_it);
    table->weight.requires_grad_(false);
    EXPECT_NO_THROW(ddp.forward(loss).backward());
  });
}

TEST(DataParallelErrors, ARankThatDies) {
  on_ranks(2, [] {
    auto model = tiny_model();
    const auto group = init_process_group(quick());
    DataParallel ddp(model, group);
    const auto loss = ddp.forward([&] { return loss_of(model); });
    if (group->rank() == 1) {
      ::_exit(0);
    }
    EXPECT_THAT(error_of<DistributedError>([&] { loss.backward(); }),
                AllOf(HasSubstr("all_reduce: failed on rank 0 of 2"), HasSubstr("died")));
  });
}

TEST(DataParallelErrors, ARankThatDiesBeforeForwardIsNamedInEachForward) {
  on_ranks(2, [] {
    torch::nn::Sequential model(torch::nn::Linear(16, 8), torch::nn::BatchNorm1d(8));
    const auto group = init_process_group(quick());
    DataParallel ddp(model, group);
    if (group->rank() == 1) {
      ::_exit(0);
    }
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(error_of<DistributedError>([&] { ddp.forward([] { return torch::ones({}); }); }),
                  HasSubstr("broadcast: failed on rank 0 of 2"));
    }
  });
}

}  // namespace
}  // namespace snug::data_parallel_errors_test
