// The values that a region gives to backward are the values of the forward, whoever wrote the values.

#include <functional>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/jit.h>
#include <torch/torch.h>

#include "snug/checkpoint.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::checkpoint_values_test {
namespace {

using testing::gradients_of;
using testing::make_mlp;
using testing::same_bits;
using torch::Tensor;

using Forward = std::function<Tensor(Tensor)>;

// Autograd saves the noise before the kernel fills it.
TEST(CheckpointValues, OfRReluAreThoseOfPlainTraining) {
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

// A recurrent layer saves a workspace of which it does not fill every byte.
TEST(CheckpointValues, OfAnLstmWithDropoutAreThoseOfPlainTraining) {
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(5, 6).num_layers(2).dropout(0.3));
  const auto gradients = [&](bool checkpointed) {
    lstm->zero_grad();
    torch::manual_seed(1);
    const Tensor x = torch::rand({7, 3, 5}, torch::requires_grad());
    const auto forward = [&](const Tensor& h) { return std::get<0>(lstm->forward(h)).tanh(); };
    const Tensor loss = (checkpointed ? checkpoint(forward, x) : forward(x)).sum();
    torch::full({1 << 14}, 7.0);  // other bytes in the memory that is given out next
    loss.backward();
    std::vector<Tensor> all = gradients_of(*lstm);
    all.push_back(x.grad());
    return all;
  };
  EXPECT_TRUE(same_bits(gradients(true), gradients(false)));
}

// TorchScript profiles the first call and optimises the next.
TEST(CheckpointValues, OfTorchScriptAreThoseOfPlainTrainingFromTheFirstStepOn) {
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

// The counter is no part of what backward needs, and is written by a destructor.
TEST(CheckpointValues, AreRightWhereADestructorRunsOperators) {
  struct Count {
    Tensor calls;
    ~Count() {
      const torch::NoGradGuard no_grad;
      calls.add_(1);
    }
  };
  const Tensor w = torch::rand({128, 128}, torch::requires_grad()), x = torch::rand({64, 128});
  const Tensor calls = torch::zeros({});
  const auto block = [=](const Tensor& in) {
    const Count count{calls};
    return in.mm(w).tanh();
  };
  const Tensor expected = torch::autograd::grad({block(x).sum()}, {w})[0];
  EXPECT_TRUE(same_bits(torch::autograd::grad({checkpoint(block, x).sum()}, {w})[0], expected));
  EXPECT_EQ(calls.item<float>(), 2.0f);
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

TEST(CheckpointValues, OfFunctionsThatAskSeveralTimesAreThoseOfPlainTraining) {
  const Tensor w = torch::rand({4096}, torch::requires_grad());
  const auto gradients = [&](bool checkpointed) {
    const Tensor x = torch::linspace(-1, 1, 4096).requires_grad_();
    const auto block = [&](Tensor h) {
      for (int i = 0; i < 4; ++i) {
        h = Fma::apply(h.sin(), w);
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
  EXPECT_TRUE(same_bits(gradients(true), gradients(false)));
}

}  // namespace
}  // namespace snug::checkpoint_values_test
