// Tensors of every kind through every place where snug keeps, copies, compares or makes again what autograd saves: the
// bits are those of plain training.

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/FunctionalTensorWrapper.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/offload.h"
#include "snug/plan.h"
#include "src/activations/tensor_hash.h"
#include "src/core/has_bytes.h"
#include "src/remat/activation_plan.h"
#include "src/remat/profile_step.h"
#include "tests/support/planned_step.h"
#include "tests/support/random_derivative_blocks.h"
#include "tests/support/tensors.h"

namespace snug::tensor_kinds_test {
namespace {

using testing::DualLevel;
using testing::same_bits;
using testing::vmap;
using torch::Tensor;

/// A kind of tensor, made of a matrix, and a dense tensor made of one of the kind again.
struct Kind {
  std::string name;
  bool has_bytes;
  std::function<Tensor(const Tensor&)> make;
  std::function<Tensor(const Tensor&)> values;
};

Tensor as_it_is(const Tensor& tensor) { return tensor; }
Tensor to_dense(const Tensor& tensor) { return tensor.to_dense(); }
Tensor zeros_of_its_sizes(const Tensor& tensor) { return torch::zeros(tensor.sizes()); }

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all{
      {"dense", true, as_it_is, as_it_is},
      {"zero", false, [](const Tensor& m) { return at::_efficientzerotensor(m.sizes(), m.options()); },
       [](const Tensor& t) { return t + torch::ones(t.sizes()); }},
      {"view of zero", false, [](const Tensor& m) { return at::_efficientzerotensor(m.sizes(), m.options()).t(); },
       [](const Tensor& t) { return t + torch::ones(t.sizes()); }},
      {"meta", false, [](const Tensor& m) { return m.to(torch::kMeta); }, zeros_of_its_sizes},
      {"sparse", false, [](const Tensor& m) { return m.to_sparse(); }, to_dense},
      {"sparse rows", false, [](const Tensor& m) { return m.to_sparse_csr(); }, to_dense},
      {"quantized", true, [](const Tensor& m) { return torch::quantize_per_tensor(m, 0.1, 3, torch::kQInt8); },
       [](const Tensor& t) { return t.dequantize(); }},
      {"quantized by channel", true,
       [](const Tensor& m) {
         return torch::quantize_per_channel(m, torch::full({m.size(0)}, 0.1, torch::kDouble),
                                            torch::zeros({m.size(0)}, torch::kLong), 0, torch::kQInt8);
       },
       [](const Tensor& t) { return t.dequantize(); }},
      {"nested", true,
       [](const Tensor& m) {
         return at::_nested_tensor_from_tensor_list({m.narrow(0, 0, 3), m.narrow(0, 3, m.size(0) - 3)});
       },
       [](const Tensor& t) { return torch::cat(t.unbind()); }},
      {"oneDNN", false, [](const Tensor& m) { return m.to_mkldnn(); }, to_dense},
      {"functional", false, [](const Tensor& m) { return at::functionalization::impl::to_functional_tensor(m); },
       [](const Tensor& t) { return at::functionalization::impl::from_functional_tensor(t); }},
      {"conjugate", true, [](const Tensor& m) { return torch::complex(m, m.cos()).conj(); },
       [](const Tensor& t) { return torch::imag(t) + torch::real(t); }},
      {"negative", true, [](const Tensor& m) { return torch::imag(torch::complex(m, m.cos()).conj()); }, as_it_is},
      {"expanded", true, [](const Tensor& m) { return m.select(0, 1).expand({5, -1}); }, as_it_is},
      {"overlapping", true, [](const Tensor& m) { return m.as_strided({7, 7}, {1, 1}, 3); }, as_it_is},
      {"empty", true, [](const Tensor& m) { return m.narrow(0, 0, 0).clone(); }, as_it_is},
      {"freed", true,
       [](const Tensor& m) {
         const Tensor freed = m.clone();
         freed.storage().unsafeGetStorageImpl()->set_nbytes(0);
         freed.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(c10::DataPtr(nullptr, c10::kCPU));
         return freed;
       },
       zeros_of_its_sizes},
      {"scalar", true, [](const Tensor& m) { return m.sum(); }, as_it_is},
      {"bool", true, [](const Tensor& m) { return m > 0; }, [](const Tensor& t) { return t.to(torch::kFloat); }},
      {"float8", true, [](const Tensor& m) { return m.to(torch::kFloat8_e4m3fn); },
       [](const Tensor& t) { return t.to(torch::kFloat); }},
      {"in lent memory", true,
       [](const Tensor& m) {
         const auto owner = std::make_shared<Tensor>(m.contiguous());
         return torch::from_blob(owner->data_ptr(), m.sizes(), [owner](void*) {}, m.options());
       },
       as_it_is},
  };
  return all;
}

// Saves a tensor of the kind. The gradient depends on its values.
struct ScaleBy : torch::autograd::Function<ScaleBy> {
  // A pointer, since LibTorch asks tensors for their sizes, and nested ones have none.
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& h, const Tensor* of, int64_t kind) {
    context->save_for_backward({h, *of});
    context->saved_data["kind"] = kind;
    return h.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const Kind& kind = kinds()[static_cast<size_t>(context->saved_data["kind"].toInt())];
    const torch::NoGradGuard no_grad;
    return {gradients[0] * saved[0].sin() * (1 + kind.values(saved[1]).sum()), Tensor(), Tensor()};
  }
};

/// A small model in which a tensor of a kind is saved: one from before the model, or one that it makes.
struct Model {
  size_t kind;
  bool made_inside;
  Tensor weight = torch::linspace(-1, 1, 256).view({16, 16}).requires_grad_();
  Tensor input = torch::linspace(-2, 1, 512).view({32, 16});
  Tensor outside = kinds()[kind].make(torch::linspace(-3, 3, 96).view({8, 12}));

  Tensor run(const Tensor& x, const Tensor& of) const {
    const Tensor h = x.mm(weight).tanh();
    const Tensor scale = made_inside ? kinds()[kind].make((h.detach().narrow(0, 0, 8) * 2).exp()) : of;
    return ScaleBy::apply(h.exp(), &scale, static_cast<int64_t>(kind)).sin().mm(weight).square().sum();
  }
  Tensor loss() const { return run(input, outside); }
};

/// A way to run the model, and its gradient.
struct Seam {
  std::string name;
  std::function<Tensor(const Model&)> gradient;
};

Tensor gradient_of(const Model& model, const Tensor& loss) { return torch::autograd::grad({loss}, {model.weight})[0]; }

Seam region(std::string name, const CheckpointOptions& options) {
  return {std::move(name), [options](const Model& model) {
            const auto body = [model](const Tensor& x, const Tensor& of) { return model.run(x, of); };
            return gradient_of(model, checkpoint(options, body, model.input, model.outside));
          }};
}

template <class Scope, class... Args>
Seam scope(std::string name, Args... arguments) {
  return {std::move(name), [=](const Model& model) {
            Tensor loss;
            {
              const Scope keeps(arguments...);
              loss = model.loss();
            }
            return gradient_of(model, loss);
          }};
}

Seam plan(std::string name, bool is_smallest) {
  return {std::move(name), [is_smallest](const Model& model) {
            const auto forward = [&] { return model.loss(); };
            const plan::Profile profile = detail::profile_step(forward);
            const Bytes budget = is_smallest ? testing::smallest_feasible(profile) : Bytes::unlimited();
            const ActivationPlan found = detail::plan_activations(profile, forward, budget);
            Tensor loss;
            {
              const Rematerialize scope(found);
              loss = model.loss();
              EXPECT_EQ(scope.deviation(), "");
            }
            return gradient_of(model, loss);
          }};
}

const std::vector<Seam>& seams() {
  static const std::vector<Seam> all{
      scope<SavedTensorHooks>(
          "hooks", [](const Tensor& t) { return std::any(t.detach()); },
          [](std::any& packed) { return std::any_cast<Tensor>(packed); }),
      scope<MemoryMeter>("meter"),
      scope<SaveOnHost>("offload", OffloadOptions{.min_bytes = Bytes(0)}),
      region("region", {}),
      region("region that keeps", {.policy = [](std::string_view) { return Keep::Save; }}),
      region("region that offloads", {.policy = [](std::string_view) { return Keep::Offload; }}),
      {"offloaded region",
       [](const Model& model) {
         const auto body = [model](const Tensor& x, const Tensor& of) { return model.run(x, of); };
         Tensor loss;
         {
           const SaveOnHost host({.min_bytes = Bytes(0)});
           loss = checkpoint(body, model.input, model.outside);
         }
         return gradient_of(model, loss);
       }},
      plan("plan", false),
      plan("smallest plan", true),
  };
  return all;
}

TEST(TensorKinds, EachPassesEverySeamWithTheBitsOfPlainTraining) {
  for (size_t kind = 0; kind < kinds().size(); ++kind) {
    for (const bool made_inside : {false, true}) {
      if (made_inside && kinds()[kind].name == "freed") {
        continue;  // no operator frees what it has just made
      }
      const Model model{.kind = kind, .made_inside = made_inside};
      const Tensor plain = gradient_of(model, model.loss());
      for (const Seam& seam : seams()) {
        SCOPED_TRACE(kinds()[kind].name + (made_inside ? ", made inside; " : ", from outside; ") + seam.name);
        Tensor found;
        ASSERT_NO_THROW(found = seam.gradient(model));
        EXPECT_TRUE(same_bits(found, plain));
      }
    }
  }
}

TEST(TensorKinds, HaveBytesOrNot) {
  const Tensor matrix = torch::linspace(-3, 3, 96).view({8, 12});
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    EXPECT_EQ(detail::has_bytes(kind.make(matrix)), kind.has_bytes);
    EXPECT_NO_THROW((void)detail::TensorHashes().add(kind.make(matrix)));
  }
  EXPECT_FALSE(detail::has_bytes(Tensor()));
}

// --- derivatives forward

/// A network whose loss has a directional derivative, as flow matching has; and one whose rows are mapped.
struct Network {
  torch::nn::Sequential layers{torch::nn::Linear(9, 48), torch::nn::Tanh(), torch::nn::Linear(48, 48),
                               torch::nn::Sigmoid(), torch::nn::Linear(48, 8)};
  Tensor place = torch::linspace(-1, 1, 512).view({64, 8}), direction = place.cos(), time = place.sum(1, true).sin();

  Tensor forward(const Tensor& x) const { return torch::nn::Sequential(layers)->forward(x); }
  Tensor input(const DualLevel& level) const {
    return torch::cat({level.dual(place, direction), level.dual(time, torch::ones_like(time))}, 1);
  }
  static Tensor loss_of(const DualLevel& level, const Tensor& dual) {
    const auto [value, slope] = level.parts(dual);
    return (value - slope.tanh()).square().mean();
  }
  Tensor loss() const {
    const DualLevel level;
    return loss_of(level, forward(input(level)));
  }
  std::vector<Tensor> gradients(const Tensor& loss) const {
    return torch::autograd::grad({loss}, layers->parameters());
  }
};

TEST(ForwardModeAd, HasThePlainBitsInEveryRegionThatGetsDualTensors) {
  torch::manual_seed(1);
  const Network network;
  const std::vector<Tensor> plain = network.gradients(network.loss());
  const auto body = [network](const Tensor& x) { return network.forward(x); };
  for (const CheckpointOptions& options : {CheckpointOptions(), CheckpointOptions{.policy = save_matmuls}}) {
    for (const bool level_lasts : {false, true}) {
      std::optional<DualLevel> level(std::in_place);
      const Tensor loss = Network::loss_of(*level, checkpoint(options, body, network.input(*level)));
      if (!level_lasts) {
        level.reset();
      }
      EXPECT_TRUE(same_bits(network.gradients(loss), plain));
      EXPECT_EQ(torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr, level_lasts);
    }
  }
  std::optional<DualLevel> level(std::in_place);
  const Tensor loss = Network::loss_of(
      *level, checkpoint([body](const Tensor& x) { return checkpoint(body, checkpoint(torch::sin, x)); },
                         network.input(*level)));
  const std::vector<Tensor> expected =
      network.gradients(Network::loss_of(*level, network.forward(network.input(*level).sin())));
  level.reset();
  EXPECT_TRUE(same_bits(network.gradients(loss), expected));
}

TEST(ForwardModeAd, HasThePlainBitsInARegionThatCapturesADualTensor) {
  torch::manual_seed(1);
  const Network network;
  const auto gradients = [&](bool checkpointed) {
    std::optional<DualLevel> level(std::in_place);
    const Tensor captured = network.input(*level), x = captured.detach().cos();
    const auto body = [&](const Tensor& in) { return network.forward(in * captured); };
    const Tensor loss = Network::loss_of(*level, checkpointed ? checkpoint(body, x) : body(x));
    level.reset();
    return network.gradients(loss);
  };
  EXPECT_TRUE(same_bits(gradients(true), gradients(false)));
}

}  // namespace
}  // namespace snug::tensor_kinds_test
