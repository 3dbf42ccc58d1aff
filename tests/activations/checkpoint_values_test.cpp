// The values that a region gives to backward are the values of the forward, whoever wrote the values.

#include <algorithm>
#include <any>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/jit.h>
#include <torch/library.h>
#include <torch/torch.h>

#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/offload.h"
#include "src/memory/operator_mode.h"
#include "tests/support/small_models.h"
#include "tests/support/tensors.h"

namespace snug::checkpoint_values_test {
namespace {

using testing::gradients_of;
using testing::make_mlp;
using testing::same_bits;
using torch::Tensor;

using Forward = std::function<Tensor(Tensor)>;

Tensor gradient_of(const Forward& f, bool checkpointed) {
  torch::manual_seed(1);
  const Tensor x = torch::linspace(-1, 1, 8).requires_grad_();
  const Tensor loss = (checkpointed ? checkpoint(f, x) : f(x)).sum();
  for (int i = 0; i < 2; ++i) {  // other bytes in the memory that is given out next
    const std::vector<Tensor> others{torch::full({8}, 7.0), torch::full({8}, 8.0), torch::full({8}, 9.0)};
  }
  return torch::autograd::grad({loss}, {x})[0];
}

void expect_plain_gradient(const Forward& f) { EXPECT_TRUE(same_bits(gradient_of(f, true), gradient_of(f, false))); }

// Writes through a pointer, as a loop or a kernel of the program does.
void fill(const Tensor& tensor) {
  auto* const values = tensor.data_ptr<float>();
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    values[i] = 1 + 0.5F * static_cast<float>(i);
  }
}

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

// --- writes through pointers

TEST(CheckpointValues, OfMemoryThatIsFilledThroughAPointerAreThoseOfPlainTraining) {
  const std::vector<Forward> makers{
      [](const Tensor& h) { return torch::zeros(h.sizes()); },
      [](const Tensor& h) { return torch::empty(h.sizes()); },
      [](const Tensor& h) { return torch::zeros_like(h); },
      [](const Tensor& h) { return torch::full(h.sizes(), 3.0); },
  };
  for (size_t i = 0; i < makers.size(); ++i) {
    SCOPED_TRACE(i);
    const Forward& make = makers[i];
    expect_plain_gradient([&](const Tensor& h) {
      const Tensor memory = make(h);
      fill(memory);
      return (h.exp() * memory).sin();
    });
    expect_plain_gradient([&](const Tensor& h) {
      const Tensor memory = make(h);
      memory.mul_(2);
      fill(memory);
      return (h.exp() * memory).sin();
    });
    // The first operator that uses the memory writes results of the graph.
    expect_plain_gradient([&](const Tensor& h) {
      const Tensor memory = make(h);
      fill(memory);
      memory.index_add_(0, torch::arange(4), h.exp().narrow(0, 2, 4));
      return (memory.sum() * h.exp()).sin();
    });
    expect_plain_gradient([&](const Tensor& h) {
      const Tensor memory = make(h);
      fill(memory);
      memory.narrow(0, 0, 4).copy_(h.exp().narrow(0, 4, 4));
      return (memory.sum() * h.exp()).sin();
    });
  }
}

// Says nothing of the write, since nobody else has the clone.
struct Clipped : torch::autograd::Function<Clipped> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    Tensor y = x.clone();
    fill(y.narrow(0, 0, 4));
    context->save_for_backward({y});
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0] * context->get_saved_variables()[0]};
  }
};

TEST(CheckpointValues, OfACloneThatACustomFunctionWritesThroughAPointerAreThoseOfPlainTraining) {
  expect_plain_gradient([](const Tensor& h) { return Clipped::apply(h.exp()).sin(); });
  expect_plain_gradient([](const Tensor& h) {
    const Tensor y = Clipped::apply(h.exp());
    return (y * y).sin() * h;
  });
}

TEST(CheckpointValues, OfAResultWithoutAGradientThatIsWrittenThroughAPointerAfterAUseAreThoseOfPlainTraining) {
  expect_plain_gradient([](const Tensor& h) {
    Tensor table;
    double sum = 0;
    {
      const torch::NoGradGuard no_grad;
      table = h.cos();
      sum = table.sum().item<double>();
    }
    fill(table);
    return (h.exp() * table).sin() * sum;
  });
}

// As a batch in the buffer of a loader, which fills the buffer again.
TEST(CheckpointValues, OfLentMemoryAreThoseOfTheForward) {
  std::vector<float> batch(8);
  const auto gradient = [&](bool checkpointed) {
    const Tensor x = torch::linspace(-1, 1, 8).requires_grad_();
    std::fill(batch.begin(), batch.end(), 0.5F);
    const auto f = [&](const Tensor& h) { return (h + torch::from_blob(batch.data(), {8})).exp().sin(); };
    const Tensor loss = (checkpointed ? checkpoint(f, x) : f(x)).sum();
    std::fill(batch.begin(), batch.end(), 7.0F);
    return torch::autograd::grad({loss}, {x})[0];
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

// --- writes in place

TEST(CheckpointValues, OfGatesThatAreComputedInPlaceAreThoseOfPlainTraining) {
  const Tensor weight = torch::linspace(-1, 1, 8 * 24).view({8, 24});
  expect_plain_gradient([&](const Tensor& h) {
    const auto gates = h.view({1, 8}).mm(weight).unsafe_chunk(3, 1);
    gates[0].sigmoid_();
    gates[1].sigmoid_();
    gates[2].tanh_();
    return (gates[0] * gates[1] + gates[2]).sin();
  });
}

using Write = std::function<void(const Tensor&)>;

void expect_plain_gradient_with_writes_to_a_buffer(const Write& write) {
  const auto run = [&](bool checkpointed) {
    const Tensor buffer = torch::linspace(0, 1, 8).clone();
    const Tensor gradient = gradient_of(
        [&](const Tensor& h) {
          Tensor y = (h + buffer).exp();
          write(buffer);
          y = (y + buffer).sin();
          write(buffer);
          write(buffer);
          return (y + buffer).tanh();
        },
        checkpointed);
    return std::vector{gradient, buffer};
  };
  EXPECT_TRUE(same_bits(run(true), run(false)));
}

TEST(CheckpointValues, OfABufferThatIsReadAndThenWrittenAreThoseOfTheForward) {
  expect_plain_gradient_with_writes_to_a_buffer([](const Tensor& buffer) { buffer.mul_(2); });
  expect_plain_gradient_with_writes_to_a_buffer([](const Tensor& buffer) { buffer.narrow(0, 2, 3).fill_(4); });
}

TEST(CheckpointValues, OfABufferThatIsReadAndThenWrittenByACollectiveAreThoseOfTheForward) {
  expect_plain_gradient_with_writes_to_a_buffer([](const Tensor& buffer) {
    detail::report_coming_write(buffer);  // as ProcessGroup does
    const float first = buffer.data_ptr<float>()[0];
    fill(buffer);
    buffer.data_ptr<float>()[0] += first;
    detail::report_unseen_write(buffer);
  });
}

TEST(CheckpointValues, OfAnIntermediateThatIsReadAndThenWrittenByACollectiveAreThoseOfTheForward) {
  expect_plain_gradient([](const Tensor& h) {
    const Tensor statistics = h.detach().exp();
    const Tensor y = (h + statistics).exp();
    detail::report_coming_write(statistics);
    fill(statistics);
    detail::report_unseen_write(statistics);
    return (y + statistics).sin();
  });
}

// --- values of a storage that is written more than once

TEST(CheckpointValues, OfAnAccumulatorThatOperatorsReadBetweenWritesAreThoseOfPlainTraining) {
  expect_plain_gradient([](const Tensor& h) {
    Tensor sum = torch::zeros_like(h), y = h, all = h * 1;
    for (int i = 0; i < 4; ++i) {
      y = y.sin();
      sum.add_(y);
      all = all + (sum * 0.5).tanh();
    }
    return all;
  });
}

TEST(CheckpointValues, OfAnEarlierVersionOfAStorageThatIsKeptLaterAreThoseOfPlainTraining) {
  expect_plain_gradient([](const Tensor& x) {
    Tensor h = x * 2;
    const Tensor before = (h + 1).sin();
    {
      const torch::NoGradGuard no_grad;
      h.mul_(3);
    }
    return before + h.cos();
  });
}

TEST(CheckpointValues, OfDropoutInPlaceOnAnArgumentAreThoseOfPlainTraining) {
  const auto gradient = [](bool checkpointed) {
    torch::manual_seed(1);
    const Tensor x = torch::linspace(-1, 1, 8).requires_grad_();
    const auto f = [](Tensor h) { return torch::dropout_(h, 0.5, /*train=*/true).exp().sin(); };
    const Tensor y = checkpointed ? checkpoint(f, x * 1) : f(x * 1);
    return torch::autograd::grad({y.sum()}, {x})[0];
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

// mark_dirty explains the write, which comes before the mark.
struct HalveThroughPointer : torch::autograd::Function<HalveThroughPointer> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    auto* const values = x.data_ptr<float>();
    std::transform(values, values + x.numel(), values, [](float value) { return value / 2; });
    context->mark_dirty({x});
    return x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grads) {
    return {grads[0] / 2};
  }
};

TEST(CheckpointValues, OfABackwardPassInsideAfterAWriteThroughAPointerAreThoseOfPlainTraining) {
  expect_plain_gradient([](const Tensor& x) {
    const Tensor b = x * 2;
    const Tensor y = (b + 1).sin();
    const Tensor halved = HalveThroughPointer::apply(b);
    const Tensor slope = torch::autograd::grad({y.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    return slope * halved;
  });
}

TEST(CheckpointValues, AreThereForALaterPassThoughAnEarlierOneLetGoOfTheGraph) {
  const auto gradient = [](bool checkpointed) {
    const Tensor x = torch::linspace(-1, 1, 8).requires_grad_();
    const auto f = [](const Tensor& h) {
      const Tensor shift = h.detach().exp();  // kept, since it has no gradient
      return std::pair((h + shift).exp(), (h * 2 + shift).sin());
    };
    auto [first, second] = checkpointed ? checkpoint(f, x) : f(x);
    const Tensor loss = first.sum();
    second.sum().backward();
    first.reset();
    loss.backward();
    return x.grad();
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

// --- operators of libraries

Tensor noisy(const Tensor& x) { return x + at::randn_like(x); }
TORCH_LIBRARY(snug_checkpoint_test, library) { library.def("noisy(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(snug_checkpoint_test, CPU, library) { library.impl("noisy", &noisy); }

struct Noisy : torch::autograd::Function<Noisy> {
  static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const at::AutoGradMode in_graph(true);
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow("snug_checkpoint_test::noisy", "")
        .typed<Tensor(const Tensor&)>()
        .call(x);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grads) {
    return {grads[0]};
  }
};

// No tag of the operator says that the operator draws.
TEST(CheckpointValues, OfAnOperatorThatDrawsUnsaidAreThoseOfTheForward) {
  expect_plain_gradient([](const Tensor& h) { return Noisy::apply(h.exp()).sin(); });
}

// --- random numbers

TEST(CheckpointValues, OfADropoutMaskAreMadeAgainAndNotHeld) {
  constexpr int64_t kItems = 1024;
  const auto run = [](bool checkpointed) {
    torch::manual_seed(2);
    const Tensor x = torch::linspace(-1, 1, kItems).requires_grad_();
    const auto f = [](const Tensor& h) { return torch::dropout(h.exp(), 0.5, /*train=*/true).exp().sum(); };
    const MemoryMeter meter;
    const Tensor loss = checkpointed ? checkpoint(f, x) : f(x);
    const int64_t held = meter.report().live_bytes;
    loss.backward();
    return std::pair(held, x.grad());
  };
  const auto [held, gradient] = run(true);
  const auto [plainly_held, expected] = run(false);
  EXPECT_GT(plainly_held, kItems * 4);
  EXPECT_EQ(held, 4) << "the loss";
  EXPECT_TRUE(same_bits(gradient, expected));
}

// --- policies around the region

// The input of the region is gone when backward begins.
void expect_plain_gradient_within_any_policy(const Forward& input, const Forward& body) {
  using Scope = std::function<std::shared_ptr<void>()>;
  const std::vector<Scope> scopes{
      [] { return nullptr; },
      [] { return std::make_shared<SaveOnHost>(OffloadOptions{.min_bytes = Bytes(0)}); },
      [] {
        return std::make_shared<SavedTensorHooks>([](const Tensor& t) { return std::any(t.clone()); },
                                                  [](std::any& kept) { return std::any_cast<Tensor&>(kept); });
      },
  };
  const auto gradient = [&](const Forward& run, const Scope& begin) {
    const Tensor x = torch::linspace(-1, 1, 48).view({6, 8}).requires_grad_();
    Tensor loss;
    {
      const auto scope = begin();
      loss = run(x).sum();
    }
    return torch::autograd::grad({loss}, {x})[0];
  };
  const Tensor expected = gradient([&](const Tensor& x) { return body(input(x)); }, scopes[0]);
  const Forward region = [&](const Tensor& x) { return checkpoint(body, input(x)); };
  const Forward nested = [&](const Tensor& x) { return checkpoint(region, x); };
  for (size_t scope = 0; scope < scopes.size(); ++scope) {
    SCOPED_TRACE(::testing::Message() << "scope " << scope);
    EXPECT_TRUE(same_bits(gradient(region, scopes[scope]), expected));
    EXPECT_TRUE(same_bits(gradient(nested, scopes[scope]), expected)) << "nested";
  }
}

TEST(CheckpointValues, OfAPartOfALargerTensorComeBackFromAnyPolicyAroundTheRegion) {
  const std::vector<Forward> parts{
      [](const Tensor& whole) { return whole.narrow(0, 2, 3); },
      [](const Tensor& whole) { return whole.select(1, 5); },
      [](const Tensor& whole) { return whole.t().narrow(0, 1, 4); },
      [](const Tensor& whole) { return whole.as_strided({2, 3}, {9, 2}, 7); },
  };
  const Forward body = [](const Tensor& h) { return (h.exp().sin() * h).tanh(); };
  for (size_t part = 0; part < parts.size(); ++part) {
    SCOPED_TRACE(::testing::Message() << "part " << part);
    expect_plain_gradient_within_any_policy([&](const Tensor& x) { return parts[part](x + 1); }, body);
  }
}

TEST(CheckpointValues, OfAnArgumentThatTheRegionWritesComeBackFromAnyPolicyAroundTheRegion) {
  expect_plain_gradient_within_any_policy([](const Tensor& x) { return x + 1; },
                                          [](const Tensor& h) {
                                            h.mul_(2);
                                            return (h.exp() * h).sin();
                                          });
}

}  // namespace
}  // namespace snug::checkpoint_values_test
