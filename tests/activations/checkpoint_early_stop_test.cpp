// How far a recomputation goes, and how often.

#include <array>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/jit.h>
#include <torch/torch.h>

#include "snug/autocast.h"
#include "snug/checkpoint.h"
#include "snug/memory.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::checkpoint_early_stop_test {
namespace {

using testing::gradients_of;
using testing::make_mlp;
using testing::same_bits;
using torch::Tensor;

using Forward = std::function<Tensor(Tensor)>;

TEST(Checkpoint, StopsEarlyUnlessToldNotTo) {
  for (const bool early_stop : {true, false}) {
    int begun = 0;
    int ended = 0;
    const Tensor x = torch::rand({3}, torch::requires_grad());
    checkpoint(
        {.early_stop = early_stop},
        [&](const Tensor& t) {
          ++begun;
          const Tensor y = t.exp() + 1;
          ++ended;
          return y;
        },
        x)
        .sum()
        .backward();
    EXPECT_EQ(begun, 2);
    EXPECT_EQ(ended, early_stop ? 1 : 2);
  }
}

// Autograd saves the noise before the kernel fills it.
TEST(Checkpoint, OfARegionThatEndsWithRReluGivesGradientsEqualToTheBit) {
  const auto gradients = [](bool checkpointed) {
    torch::manual_seed(1);
    auto model = make_mlp({16, 256});
    const Forward block = [model](const Tensor& x) mutable { return torch::rrelu(model->forward(x), 0.1, 0.3, true); };
    const Tensor x = torch::randn({64, 16});
    const Tensor loss = (checkpointed ? checkpoint(block, x) : block(x)).sum();
    const std::vector<Tensor> other_bytes{torch::full({64, 256}, 1e6), torch::full({64, 256}, 1e6)};
    loss.backward();
    return gradients_of(*model);
  };
  EXPECT_TRUE(same_bits(gradients(true), gradients(false)));
}

// TorchScript profiles the first call and optimises the next.
TEST(Checkpoint, OfTorchScriptGivesGradientsEqualToTheBitFromTheFirstStepOn) {
  const auto script = torch::jit::compile(R"(
def f(a, b, c, d):
    y = a * b
    z = c * d
    y = y + z
    y = y - a
    return y + z
)");
  for (int step = 0; step < 3; ++step) {
    std::vector<Tensor> x;
    for (int i = 0; i < 4; ++i) {
      x.push_back(torch::randn({8}, torch::requires_grad()));
    }
    const Tensor z = x[2] * x[3];
    const auto expected = torch::autograd::grad({((x[0] * x[1] + z) - x[0] + z).sum()}, x);
    const auto run = [script](Tensor a, Tensor b, Tensor c, Tensor d) {
      return script->run_method("f", a, b, c, d).toTensor();
    };
    const Tensor y = checkpoint(run, x[0], x[1], x[2], x[3]);
    EXPECT_TRUE(same_bits(torch::autograd::grad({y.sum()}, x), expected)) << "step " << step;
  }
}

// The counter is no part of what the recomputation needs, and is written by a destructor, which may not throw.
TEST(Checkpoint, MayStopEarlyWhereADestructorRunsOperators) {
  struct Count {
    Tensor calls;
    ~Count() {
      const torch::NoGradGuard no_grad;
      calls.add_(1);
    }
  };
  const Tensor w = torch::rand({128, 128}, torch::requires_grad()), x = torch::rand({64, 128});
  for (const bool ends_with_a_product : {false, true}) {
    const Tensor calls = torch::zeros({});
    const auto block = [=](const Tensor& in) {
      const Count count{calls};
      const Tensor y = in.mm(w).tanh();
      return ends_with_a_product ? y.mm(w) : y;
    };
    checkpoint(block, x).sum().backward();
    EXPECT_EQ(calls.item<float>(), 1.0f);
  }
}

// As a language binding makes exceptions of its own of those that come from below.
TEST(Checkpoint, MayStopEarlyWhereTheCallableTurnsExceptionsIntoOthers) {
  struct Foreign {};
  const Tensor x = torch::rand({64, 64}, torch::requires_grad());
  const auto body = [](const Tensor& h) {
    try {
      return h.exp() + 1;
    } catch (const std::exception&) {
      throw Foreign();
    }
  };
  checkpoint(body, x).sum().backward();
  EXPECT_TRUE(same_bits(x.grad(), x.detach().exp()));
}

// Asks for its tensors one at a time.
struct Fma : torch::autograd::Function<Fma> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& w) {
    const Tensor y = (x * w).tanh();
    context->save_for_backward({x, w, y});
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const Tensor y = context->get_saved_variables()[2];
    const Tensor g = gradients[0] * (1 - y * y);
    return {g * context->get_saved_variables()[1], g * context->get_saved_variables()[0]};
  }
};

TEST(Checkpoint, OfFunctionsThatAskSeveralTimesRunsAgainOnce) {
  int calls = 0;
  const Tensor w = torch::rand({4096}, torch::requires_grad());
  const auto gradients = [&](bool checkpointed) {
    const Tensor x = torch::linspace(-1, 1, 4096).requires_grad_();
    const auto block = [&](Tensor h) {
      ++calls;
      for (int i = 0; i < 4; ++i) {
        h = Fma::apply(h, w);
      }
      return h;
    };
    const Tensor loss = (checkpointed ? checkpoint(block, x) : block(x)).sum();
    std::vector<Tensor> all = torch::autograd::grad({loss}, {x, w}, {}, /*retain_graph=*/true);
    for (const Tensor& one : torch::autograd::grad({loss}, {x, w})) {
      all.push_back(one);
    }
    return all;
  };
  const auto expected = gradients(false);
  calls = 0;
  EXPECT_TRUE(same_bits(gradients(true), expected));
  EXPECT_EQ(calls, 3) << "forward, and once for each backward pass";
}

}  // namespace
}  // namespace snug::checkpoint_early_stop_test
