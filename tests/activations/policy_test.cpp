#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <torch/torch.h>

#include "program/models/gpt.h"
#include "snug/autocast.h"
#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "tests/support/counted_kernels.h"
#include "tests/support/tensors.h"

namespace snug::policy_test {
namespace {

using testing::CountedKernels;
using testing::error_of;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;

const std::string kAttention = "aten::_scaled_dot_product_flash_attention_for_cpu";

struct GptRun {
  std::vector<Tensor> gradients;
  std::map<std::string, int> backward;  // runs of kernels, the recomputation's among them
  int64_t held = 0;                     // bytes between forward and backward
};

GptRun run_gpt(const std::optional<CheckpointPolicy>& policy, double dropout = 0) {
  torch::manual_seed(1);
  Gpt model(GptOptions{.vocab = 32, .context = 16, .layers = 2, .heads = 2, .width = 16, .dropout = dropout});
  if (policy) {
    model->set_block_runner(
        [&](const auto& block, Tensor x) { return checkpoint({.policy = *policy}, block, std::move(x)); });
  }
  const Tensor tokens = torch::randint(32, {2, 16});
  const MemoryMeter meter;
  const Tensor loss = model->forward(tokens).square().mean();
  GptRun run;
  run.held = meter.report().live_bytes;
  const std::vector<std::string> kernels{"aten::addmm", "aten::mm",  "aten::bmm", "aten::native_layer_norm",
                                         kAttention,    "aten::gelu"};
  const CountedKernels runs(kernels);
  loss.backward();
  run.gradients = gradients_of(*model);
  for (const std::string& kernel : kernels) {
    run.backward[kernel] = runs.of(kernel);
  }
  return run;
}

const CheckpointPolicy kNothing{};

TEST(CheckpointPolicy, KeepsMatricesAndRunsNoneOfThemAgain) {
  const GptRun plain = run_gpt(std::nullopt), all = run_gpt(kNothing), saved = run_gpt(save_matmuls);
  EXPECT_TRUE(same_bits(all.gradients, plain.gradients));
  EXPECT_TRUE(same_bits(saved.gradients, plain.gradients));
  const auto products = [](const GptRun& run) {
    return run.backward.at("aten::addmm") + run.backward.at("aten::mm") + run.backward.at("aten::bmm");
  };
  EXPECT_GT(products(all), products(plain));
  EXPECT_EQ(products(saved), products(plain));
  EXPECT_EQ(saved.backward.at("aten::gelu"), 2) << "one a block, computed again";
  EXPECT_GT(saved.held, all.held);
  EXPECT_LT(saved.held, plain.held);
}

TEST(CheckpointPolicy, KeepsAttention) {
  const GptRun all = run_gpt(kNothing), saved = run_gpt(save_attention);
  ASSERT_EQ(all.backward.at(kAttention), 2);
  EXPECT_EQ(saved.backward.at(kAttention), 0);
  EXPECT_TRUE(same_bits(saved.gradients, all.gradients));
}

TEST(CheckpointPolicy, RecomputesWhatIsCheapOnly) {
  const GptRun plain = run_gpt(std::nullopt), cheap = run_gpt(recompute_pointwise);
  EXPECT_TRUE(same_bits(cheap.gradients, plain.gradients));
  EXPECT_EQ(cheap.backward.at("aten::gelu"), 2);
  EXPECT_EQ(cheap.backward.at("aten::native_layer_norm"), 4);
  EXPECT_EQ(cheap.backward.at(kAttention), 0);
}

TEST(CheckpointPolicy, LeavesDropoutItsRandomNumbersWhicheverOperatorIsKept) {
  const GptRun plain = run_gpt(std::nullopt, 0.3);
  for (const CheckpointPolicy& policy :
       {CheckpointPolicy(save_matmuls), CheckpointPolicy(recompute_pointwise),
        CheckpointPolicy([](std::string_view) { return Keep::Save; }),
        policy_of({{"aten::native_dropout", Keep::Save}, {"aten::bernoulli_", Keep::Save}})}) {
    EXPECT_TRUE(same_bits(run_gpt(policy, 0.3).gradients, plain.gradients));
  }
}

Tensor in_place_chain(const Tensor& x, const Tensor& w) { return x.mm(w).add_(1.0).relu_().sin(); }

TEST(CheckpointPolicy, TakesWhatInPlaceOperatorsMadeOfAKeptResult) {
  const Tensor w = torch::rand({4, 4});
  const auto run = [&](std::optional<CheckpointPolicy> policy) {
    const Tensor x = torch::linspace(-1, 1, 8).view({2, 4}).clone().requires_grad_();
    Tensor y = policy ? checkpoint({.policy = *policy}, in_place_chain, x, w) : in_place_chain(x, w);
    const CountedKernels runs({"aten::add_.Tensor", "aten::relu_"});
    y.sum().backward();
    return std::pair(x.grad(), runs.of("aten::add_.Tensor") + runs.of("aten::relu_"));
  };
  const auto [plain, plain_runs] = run(std::nullopt);
  EXPECT_EQ(plain_runs, 0);
  const auto [dropped, runs_of_dropped] = run(kNothing);
  EXPECT_TRUE(same_bits(dropped, plain));
  EXPECT_EQ(runs_of_dropped, 2);
  const auto [kept, runs_of_kept] = run(save_matmuls);
  EXPECT_TRUE(same_bits(kept, plain));
  EXPECT_EQ(runs_of_kept, 0) << "their effect is in the product that was kept";
}

TEST(CheckpointPolicy, ComputesAResultAgainThatWasReadBeforeItWasWritten) {
  const Tensor w = torch::rand({4, 4});
  const auto f = [](const Tensor& h, const Tensor& weight) {
    Tensor product = h.mm(weight);
    const Tensor read = (product * product.detach()).detach();
    product.mul_(3.0);
    return product * read;
  };
  const auto gradient = [&](bool checkpointed) {
    const Tensor x = torch::linspace(-1, 1, 8).view({2, 4}).clone().requires_grad_();
    (checkpointed ? checkpoint({.policy = save_matmuls}, f, x, w) : f(x, w)).sum().backward();
    return x.grad();
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

TEST(CheckpointPolicy, ComputesAResultAgainThatWasTurnedInPlace) {
  const Tensor w = torch::rand({4, 4});
  const auto f = [](const Tensor& h, const Tensor& weight) {
    Tensor product = h.mm(weight);
    product.t_();
    return product.sin() * h;
  };
  const auto gradient = [&](bool checkpointed) {
    const Tensor x = torch::linspace(-1, 1, 16).view({4, 4}).clone().requires_grad_();
    (checkpointed ? checkpoint({.policy = save_matmuls}, f, x, w) : f(x, w)).sum().backward();
    return x.grad();
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

// A write to the mean is part of what is kept, until a write to another result of the same operator, which was read,
// ends the keeping.
TEST(CheckpointPolicy, ComputesAllResultsOfAnOperatorAgainIfOneWasReadBeforeItWasWritten) {
  const auto f = [](const Tensor& h) {
    auto [normal, mean, rstd] = at::native_layer_norm(h.detach(), {4}, {}, {}, 1e-5);
    mean.add_(1.0);
    const Tensor read = rstd.exp();
    rstd.mul_(3.0);
    return (h * (normal + mean * rstd + read)).sin();
  };
  const auto gradient = [&](std::optional<Keep> keep) {
    const Tensor x = torch::linspace(-1, 1, 8).view({2, 4}).clone().requires_grad_();
    (keep ? checkpoint({.policy = policy_of({{"aten::native_layer_norm", *keep}})}, f, x) : f(x)).sum().backward();
    return x.grad();
  };
  for (const Keep keep : {Keep::Save, Keep::Offload}) {
    EXPECT_TRUE(same_bits(gradient(keep), gradient(std::nullopt)));
  }
}

// As functions written for speed do: the kernel first, then mark_dirty.
struct HalveInPlace : torch::autograd::Function<HalveInPlace> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& h) {
    auto* const values = h.data_ptr<float>();
    for (int64_t i = 0; i < h.numel(); ++i) {
      values[i] *= 0.5f;
    }
    context->mark_dirty({h});
    return h;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0] * 0.5};
  }
};

TEST(CheckpointPolicy, ComputesAResultAgainThatACustomFunctionWroteThroughAPointer) {
  const Tensor w = torch::rand({4, 4});
  const auto f = [](const Tensor& h, const Tensor& weight) {
    return HalveInPlace::apply(h.mm(weight).add_(1.0)).tanh();
  };
  const auto gradient = [&](std::optional<Keep> keep) {
    const Tensor x = torch::linspace(-1, 1, 8).view({2, 4}).clone().requires_grad_();
    (keep ? checkpoint({.policy = policy_of({{"aten::mm", *keep}})}, f, x, w) : f(x, w)).sum().backward();
    return x.grad();
  };
  for (const Keep keep : {Keep::Save, Keep::Offload}) {
    EXPECT_TRUE(same_bits(gradient(keep), gradient(std::nullopt)));
  }
}

// A table that is made in the first call, by operators that the policy keeps too.
TEST(CheckpointPolicy, KeepsATableThatTheRegionMakesOnce) {
  const auto run = [](bool checkpointed) {
    torch::manual_seed(1);
    const Tensor w = torch::rand({8, 8}, torch::requires_grad()), base = torch::rand({8, 8});
    const auto table = std::make_shared<Tensor>();
    const auto f = [=](const Tensor& h) {
      if (!table->defined()) {
        const torch::NoGradGuard no_grad;
        *table = base.mm(base);
      }
      return (h.mm(w) * *table).tanh();
    };
    const Tensor x = torch::rand({8, 8});
    const Tensor y = checkpointed ? checkpoint({.policy = save_matmuls}, f, x) : f(x);
    const CountedKernels runs({"aten::mm"});
    y.sum().backward();
    return std::pair(w.grad(), runs.of("aten::mm"));
  };
  const auto [plain, plain_products] = run(false);
  const auto [kept, products] = run(true);
  EXPECT_TRUE(same_bits(kept, plain));
  EXPECT_EQ(products, plain_products);
}

// The second region finds casts in autocast's cache.
TEST(CheckpointPolicy, KeepsResultsUnderAutocastWhoseCacheAnotherRegionFilled) {
  torch::nn::Linear layer(8, 8);
  const auto run = [&](bool checkpointed) {
    layer->zero_grad();
    auto f = [layer](const Tensor& h) mutable { return layer->forward(h).tanh(); };
    Tensor h = torch::linspace(-1, 1, 32).view({4, 8});
    {
      const Autocast autocast(torch::kCPU, torch::kBFloat16);
      for (int i = 0; i < 2; ++i) {
        h = checkpointed ? checkpoint({.policy = save_matmuls}, f, h) : f(h);
      }
    }
    const CountedKernels runs({"aten::addmm", "aten::mm"});
    h.to(torch::kFloat).sum().backward();
    return std::tuple(gradients_of(*layer), runs.of("aten::addmm") + runs.of("aten::mm"));
  };
  EXPECT_EQ(std::get<1>(run(true)), std::get<1>(run(false)));
  EXPECT_TRUE(same_bits(std::get<0>(run(true)), std::get<0>(run(false))));
}

TEST(CheckpointPolicy, SeesThatANumberWasReadBeforeTheWrite) {
  const auto f = [](const Tensor& h) {
    double number = 0;
    {
      const torch::NoGradGuard no_grad;
      Tensor sum = h.detach().dot(h.detach());
      number = sum.item<double>();
      sum.add_(1.0);
    }
    return (h * number).sin();
  };
  const auto gradient = [&](bool checkpointed) {
    const Tensor x = torch::linspace(-1, 1, 8).clone().requires_grad_();
    (checkpointed ? checkpoint({.policy = save_matmuls}, f, x) : f(x)).sum().backward();
    return x.grad();
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

TEST(CheckpointPolicy, WorksAroundInferenceMode) {
  const Tensor w = torch::rand({4, 4});
  const auto f = [w](const Tensor& h) {
    Tensor teacher;
    {
      const c10::InferenceMode mode;
      teacher = torch::ones({2, 4}).mm(w);
    }
    return h.mm(w).sin() + teacher.sum().item<double>();
  };
  const Tensor x = torch::rand({2, 4}, torch::requires_grad());
  EXPECT_NO_THROW(checkpoint({.policy = save_matmuls}, f, x).sum().backward());
}

// The sum does not save the product, so autograd has nothing against the write.
TEST(CheckpointPolicy, ComputesAResultAgainThatWasWrittenAfterTheRegion) {
  const Tensor w = torch::rand({4, 4});
  const auto f = [](const Tensor& h, const Tensor& weight) {
    const Tensor product = h.mm(weight);
    return std::pair(product, (product + 1).sin());
  };
  const auto gradient = [&](std::optional<Keep> keep) {
    const Tensor x = torch::linspace(-1, 1, 8).view({2, 4}).clone().requires_grad_();
    auto [product, y] = keep ? checkpoint({.policy = policy_of({{"aten::mm", *keep}})}, f, x, w) : f(x, w);
    {
      const torch::NoGradGuard no_grad;
      product.zero_();
    }
    y.sum().backward();
    return x.grad();
  };
  for (const Keep keep : {Keep::Save, Keep::Offload}) {
    EXPECT_TRUE(same_bits(gradient(keep), gradient(std::nullopt)));
  }
}

TEST(CheckpointPolicy, WorksInSeveralBackwardPassesAndNested) {
  torch::nn::Linear layer(4, 4);
  const auto f = [layer](const Tensor& h) mutable { return layer->forward(h).tanh(); };
  const auto gradient = [&](int levels) {
    layer->zero_grad();
    const Tensor x = torch::linspace(-1, 1, 8).view({2, 4}).clone().requires_grad_();
    std::function<Tensor(const Tensor&)> call = f;
    for (int i = 0; i < levels; ++i) {
      call = [call](const Tensor& h) { return checkpoint({.policy = save_matmuls}, call, h); };
    }
    const Tensor loss = call(x).sum();
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
    return x.grad();
  };
  EXPECT_TRUE(same_bits(gradient(1), gradient(0)));
  EXPECT_TRUE(same_bits(gradient(2), gradient(0)));
}

TEST(CheckpointPolicy, OffloadsExactly) {
  const GptRun plain = run_gpt(std::nullopt);
  const auto products = [](Keep keep) {
    return std::map<std::string, Keep>{{"aten::addmm", keep}, {"aten::mm", keep}};
  };
  const GptRun offloaded = run_gpt(policy_of(products(Keep::Offload)));
  EXPECT_TRUE(same_bits(offloaded.gradients, plain.gradients));
  const GptRun saved = run_gpt(policy_of(products(Keep::Save))), all = run_gpt(kNothing);
  EXPECT_GT(saved.held, all.held);
}

TEST(CheckpointPolicy, OfAnOperatorThatDoesNotExistIsRefused) {
  EXPECT_THAT(error_of<ConfigError>([] { policy_of({{"aten::matmull", Keep::Save}}); }), HasSubstr("aten::matmull"));
}

}  // namespace
}  // namespace snug::policy_test
