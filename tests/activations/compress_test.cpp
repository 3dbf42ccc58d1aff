#include "snug/activations/compress.h"

#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/activations/checkpoint.h"
#include "snug/activations/detail/block_codes.h"
#include "snug/activations/detail/packed_mask.h"
#include "snug/memory/detail/saved_tensor_policy.h"
#include "snug/memory/meter.h"
#include "snug/precision/autocast.h"
#include "tests/support/late_writes.h"
#include "tests/support/tensors.h"

namespace snug::compress_test {
namespace {

using testing::gradients_of;
using testing::same_bits;
using torch::Tensor;

constexpr int64_t kKiB = 1024;

std::vector<Compression> all_compressions() {
  return {Compression::BFloat16, Compression::Float16, Compression::Int8, Compression::Int4};
}

/// Saves a tensor, for which round_trip() asks.
class Identity : public torch::autograd::Function<Identity> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& trigger, const Tensor& saved) {
    context->save_for_backward({saved});
    return trigger.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& grads) {
    return {grads[0], Tensor()};
  }
};

/// What a node of LibTorch's gets. (A custom function that asks in backward gets copies, lest it return what it saved.)
Tensor round_trip(const Tensor& tensor, Compression compression, CompressOptions options = {}) {
  const Tensor trigger = torch::ones({1}, torch::requires_grad());
  Tensor y;
  {
    const SaveCompressed scope(compression, options);
    y = Identity::apply(trigger, tensor);
  }
  const auto& node = static_cast<const torch::autograd::CppNode<Identity>&>(*y.grad_fn());
  return node.ctx_.get_saved_variables().front().detach();
}

/// Something autograd computed: neither a parameter nor data.
Tensor computed(const Tensor& values) { return values.detach().clone().requires_grad_() * 1; }

int64_t bytes_saved(std::optional<Compression> compression, const std::function<Tensor()>& forward) {
  const MemoryMeter meter;
  Tensor y;
  {
    std::optional<SaveCompressed> scope;
    if (compression) {
      scope.emplace(*compression);
    }
    y = forward();
  }
  return meter.report().activations;
}

/// What the header promises for an element x of a block between least and greatest.
Tensor bound_of(Compression compression, const Tensor& x) {
  const Tensor magnitude = x.abs().to(torch::kDouble);
  switch (compression) {
    case Compression::BFloat16:
      return magnitude * 0x1p-8;
    case Compression::Float16:
      return torch::clamp_min(magnitude * 0x1p-11, 0x1p-25);
    case Compression::Int8:
    case Compression::Int4:
      break;
  }
  const Tensor blocks = x.reshape({-1, 256}).to(torch::kDouble);
  const Tensor width = blocks.amax(1, true) - blocks.amin(1, true);
  const Tensor rounding = 4 * 0x1p-24 * blocks.abs().amax(1, true);  // of FP32, in least + step * code
  return (width / (compression == Compression::Int8 ? 255 : 15) + rounding).expand_as(blocks).reshape(x.sizes());
}

TEST(SaveCompressed, GivesBackValuesWithinItsBounds) {
  torch::manual_seed(1);
  for (const auto compression : all_compressions()) {
    const Tensor x = computed(torch::randn({64, 256}) * torch::logspace(-6, 4, 64).unsqueeze(1));
    const Tensor back = round_trip(x, compression);
    EXPECT_FALSE(same_bits(back, x));
    EXPECT_TRUE(((back - x).abs().to(torch::kDouble) <= bound_of(compression, x.detach())).all().item<bool>())
        << static_cast<int>(compression);
  }
}

TEST(SaveCompressed, RestoresSizesStridesAndDtype) {
  torch::manual_seed(1);
  const Tensor base = computed(torch::randn({3, 40, 16, 8}));
  const std::vector<Tensor> tensors{base,
                                    base.transpose(1, 3),
                                    base.select(0, 1),
                                    base.slice(1, 3, 30),
                                    base.slice(2, 1, 16, 2),
                                    base.permute({3, 0, 2, 1}).select(2, 5),
                                    base.narrow(0, 2, 1).expand({5, 40, 16, 8})};
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
    for (const auto compression : all_compressions()) {
      for (size_t i = 0; i < tensors.size(); ++i) {
        const Tensor x =
            computed(base.to(dtype)).as_strided(tensors[i].sizes(), tensors[i].strides(), tensors[i].storage_offset());
        const Tensor back = round_trip(x, compression);
        EXPECT_EQ(back.sizes(), x.sizes());
        EXPECT_EQ(back.strides(), x.strides());
        EXPECT_EQ(back.scalar_type(), dtype);
        EXPECT_TRUE(torch::allclose(back, x, 0, 0.6)) << i;  // a step of Int4, for values within +-4.5
      }
    }
  }
}

TEST(SaveCompressed, KeepsParametersDataIntegersAndSmallTensorsAsTheyAre) {
  torch::manual_seed(1);
  const Tensor parameter = torch::randn({64, 64}, torch::requires_grad());
  const Tensor data = torch::randn({64, 64});
  const Tensor low = parameter.to(torch::kBFloat16);
  for (const auto compression : all_compressions()) {
    for (const Tensor& tensor :
         {parameter, parameter.t(), parameter.view({-1}).narrow(0, 64, 1024), data, data.t(), low, low.t(),
          torch::arange(5000), torch::arange(5000, torch::kInt), computed(torch::randn({1023}))}) {
      EXPECT_EQ(round_trip(tensor, compression).const_data_ptr(), tensor.const_data_ptr());
    }
    EXPECT_NE(round_trip(computed(torch::randn({1024})), compression).numel(), 0);
  }
}

TEST(SaveCompressed, KeepsAsItIsWhatTheFormatCannotHold) {
  const auto is_kept = [](Tensor x, Compression compression) {
    return round_trip(x, compression).const_data_ptr() == x.const_data_ptr();
  };
  for (const float value : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN(), 65520.0f}) {
    Tensor x = torch::ones({2000});
    x[1500] = value;
    EXPECT_TRUE(is_kept(computed(x), Compression::Float16)) << value;
    for (const auto compression : {Compression::Int8, Compression::Int4}) {
      EXPECT_EQ(is_kept(computed(x), compression), !std::isfinite(value)) << value;
    }
    EXPECT_FALSE(is_kept(computed(x), Compression::BFloat16));
  }
  const Tensor low = computed(torch::randn({5000}).to(torch::kBFloat16));
  EXPECT_TRUE(is_kept(low, Compression::BFloat16)) << "no byte would be won";
  EXPECT_TRUE(is_kept(low, Compression::Float16));
  EXPECT_FALSE(is_kept(low, Compression::Int8));
}

TEST(SaveCompressed, PacksMasksAndDropoutFactorsExactly) {
  torch::manual_seed(1);
  for (const auto compression : all_compressions()) {
    const Tensor mask = torch::rand({70, 81}) < 0.3;
    EXPECT_TRUE(same_bits(round_trip(mask, compression), mask));
    EXPECT_TRUE(same_bits(round_trip(mask.t(), compression), mask.t()));
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16}) {
      const Tensor noise = torch::empty({70, 81}, dtype).bernoulli_(0.7).div_(0.7);
      const Tensor back = round_trip(noise, compression);
      EXPECT_NE(back.const_data_ptr(), noise.const_data_ptr());
      EXPECT_TRUE(same_bits(back, noise));
    }
  }
}

// MemoryMeter counts what autograd holds. 1 MiB of FP32 is 1,024 blocks of 256; each has two floats.
TEST(SaveCompressed, HoldsAsFewBytesAsPromised) {
  const auto x = torch::randn({1024, 256}, torch::requires_grad());
  const auto forward = [&] { return (x * 1).exp().sum(); };  // exp saves its result
  EXPECT_EQ(bytes_saved({}, forward), 1024 * kKiB);
  EXPECT_EQ(bytes_saved(Compression::BFloat16, forward), 512 * kKiB);
  EXPECT_EQ(bytes_saved(Compression::Float16, forward), 512 * kKiB);
  EXPECT_EQ(bytes_saved(Compression::Int8, forward), 256 * kKiB + 8 * kKiB);
  EXPECT_EQ(bytes_saved(Compression::Int4, forward), 128 * kKiB + 8 * kKiB);
  const auto dropout = [&] { return torch::dropout(x * 1, 0.5, true).sum(); };
  EXPECT_EQ(bytes_saved({}, dropout), 1024 * kKiB);
  EXPECT_EQ(bytes_saved(Compression::BFloat16, dropout), 32 * kKiB) << "one bit an element";
}

TEST(SaveCompressed, CompressesAStorageOnceForAllTensorsSavedFromIt) {
  const auto x = torch::randn({4, 3, 256, 64}, torch::requires_grad());
  const auto forward = [&] {
    const Tensor h = x * 1;
    const Tensor q = h.select(1, 0), k = h.select(1, 1), v = h.select(1, 2);
    return (h.sin() + h.flatten().cos().view_as(h)).sum() + (q * k).sum() + (q * v).sum();
  };
  EXPECT_EQ(bytes_saved({}, forward), 768 * kKiB);
  EXPECT_EQ(bytes_saved(Compression::Int8, forward), 192 * kKiB + 6 * kKiB);
}

TEST(SaveCompressed, CompressesAgainWhatWasWrittenInPlaceBetween) {
  const auto x = torch::rand({2000}, torch::requires_grad());
  const SaveCompressed scope(Compression::BFloat16);
  Tensor h = x * 1;
  const Tensor unused = h.sin();  // keeps h as it is now
  h.mul_(3);
  h.sin().sum().backward();
  const Tensor kept = (x.detach() * 3).to(torch::kBFloat16).to(torch::kFloat);
  EXPECT_TRUE(same_bits(x.grad(), kept.cos() * 3));
}

// FP16's errors are 2^-11 per tensor, and a few of them follow each other.
TEST(SaveCompressed, HasWhatOperatorsWriteAfterTheSave) {
  for (const auto& model : testing::late_writes()) {
    const auto gradients = [&](bool compressed) {
      torch::manual_seed(5);
      Tensor loss;
      {
        std::optional<SaveCompressed> scope;
        if (compressed) {
          scope.emplace(Compression::Float16, CompressOptions{.min_bytes = Bytes(0)});
        }
        loss = model.loss();
      }
      return torch::autograd::grad({loss}, model.leaves);
    };
    const auto exact = gradients(false), approximate = gradients(true);
    for (size_t i = 0; i < exact.size(); ++i) {
      EXPECT_TRUE(testing::close_in_norm(approximate[i], exact[i], 0.01)) << model.name << ", leaf " << i;
    }
  }
}

// Autograd takes a gradient that nobody else holds for its own, and adds to it.
struct Dot : torch::autograd::Function<Dot> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& a, const Tensor& b) {
    context->save_for_backward({a, b});
    return (a * b).sum();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list&) {
    const auto saved = context->get_saved_variables();
    return {saved[1], saved[0]};
  }
};

TEST(SaveCompressed, AParameterThatAFunctionReturnsAsAGradientIsNotTheGradient) {
  const Tensor a = torch::full({2048}, 2.0f).requires_grad_(), b = torch::full({2048}, 3.0f).requires_grad_();
  const SaveCompressed scope(Compression::BFloat16);
  for (int pass = 1; pass <= 2; ++pass) {
    Dot::apply(a, b).backward();
    EXPECT_NE(a.grad().const_data_ptr(), b.const_data_ptr());
    EXPECT_TRUE(same_bits(a.grad(), torch::full({2048}, 3.0f * static_cast<float>(pass))));
    EXPECT_TRUE(same_bits(b.detach(), torch::full({2048}, 3.0f)));
  }
}

TEST(SaveCompressed, LeavesNothingBehindWhenTheGraphIsGone) {
  const auto x = torch::rand({5000}, torch::requires_grad());
  const SaveCompressed scope(Compression::Int8);
  const MemoryMeter meter;
  for (int i = 0; i < 200; ++i) {
    (x * 1).exp().exp().sum();
  }
  EXPECT_EQ(meter.report().live_bytes, 0);
}

struct Mlp {
  torch::nn::Sequential layers;
  explicit Mlp(double dropout = 0) {
    torch::manual_seed(2);
    layers = torch::nn::Sequential(torch::nn::Linear(64, 128), torch::nn::GELU(), torch::nn::Dropout(dropout),
                                   torch::nn::Linear(128, 64), torch::nn::Tanh(), torch::nn::Linear(64, 32));
  }
  std::vector<Tensor> gradients(std::optional<Compression> compression, CompressOptions options = {}) {
    layers->zero_grad();
    torch::manual_seed(3);
    Tensor y;
    {
      std::optional<SaveCompressed> scope;
      if (compression) {
        scope.emplace(*compression, options);
      }
      y = layers->forward(torch::randn({256, 64}));
    }
    y.pow(2).sum().backward();
    return gradients_of(*layers);
  }
};

// W's gradient of y = x W^T is G^T x, and G does not depend on the saved x: the error of each element is at most |G|^T
// E. To that come the roundings of two sums of 256 terms in FP32, each at most 256 * 2^-24 of the sum of magnitudes.
TEST(SaveCompressed, MovesAWeightsGradientByAtMostTheDerivedBound) {
  torch::manual_seed(4);
  const Tensor weight = torch::randn({32, 64}, torch::requires_grad());
  const Tensor g = torch::randn({256, 32});
  for (const auto compression : all_compressions()) {
    const auto gradient = [&](bool compressed, const Tensor& x) {
      std::optional<SaveCompressed> scope;
      if (compressed) {
        scope.emplace(compression);
      }
      return torch::autograd::grad({torch::linear(x, weight)}, {weight}, {g}).front();
    };
    const Tensor x = computed(torch::randn({256, 64}));
    const Tensor error = (gradient(true, x) - gradient(false, x)).abs().to(torch::kDouble);
    const Tensor magnitudes = g.abs().to(torch::kDouble).t();
    const Tensor bound = torch::matmul(
        magnitudes, bound_of(compression, x.detach()) + 2 * 256 * 0x1p-24 * x.detach().abs().to(torch::kDouble));
    EXPECT_TRUE((error <= bound).all().item<bool>());
    EXPECT_GT(error.max().item<double>(), bound.max().item<double>() / 1000) << "the test could not fail";
  }
}

// The mean over seeds of an unbiased gradient comes near the exact one as 1 / sqrt(seeds): 64 are to bring it to an
// eighth, and we ask for a quarter. Rounding to nearest in its place would stay where it is.
TEST(SaveCompressed, GivesUnbiasedGradientsInBlocks) {
  torch::manual_seed(4);
  const Tensor weight = torch::randn({32, 64}, torch::requires_grad());
  const Tensor x = computed(torch::randn({256, 64}));
  const auto gradient = [&](uint64_t seed) {
    const SaveCompressed scope(Compression::Int4, {.seed = seed});
    return torch::autograd::grad({torch::linear(x, weight).pow(2).sum()}, {weight}, {}, true).front();
  };
  const Tensor exact = torch::autograd::grad({torch::linear(x, weight).pow(2).sum()}, {weight}, {}, true).front();
  Tensor sum = torch::zeros_like(weight).detach();
  for (uint64_t seed = 0; seed < 64; ++seed) {
    sum += gradient(seed);
  }
  const double one = (gradient(0) - exact).norm().item<double>();
  EXPECT_GT(one, 0);
  EXPECT_LT((sum / 64 - exact).norm().item<double>(), one / 4);
}

TEST(SaveCompressed, IsReproducibleAndLeavesDropoutsNumbersAlone) {
  Mlp model(0.5);
  for (const auto compression : all_compressions()) {
    const auto first = model.gradients(compression);
    EXPECT_TRUE(same_bits(model.gradients(compression), first));
    // With another mask whole rows of the gradient would change.
    const auto plain = model.gradients({});
    EXPECT_LT((first[0] - plain[0]).norm().item<double>(), 0.2 * plain[0].norm().item<double>());
    EXPECT_FALSE(same_bits(first, plain));
  }
  EXPECT_FALSE(same_bits(model.gradients(Compression::Int8, {.seed = 1}), model.gradients(Compression::Int8)));
}

// Kinds of saved tensors that a row of linear layers does not have: other memory formats, indices, statistics,
// workspaces, three slices of one product. FP16's errors are 2^-11 per tensor, and a dozen of them follow each other.
TEST(SaveCompressed, WorksWithConvolutionsNormalisationsRecurrenceAndAttention) {
  torch::manual_seed(5);
  torch::nn::Conv2d conv(torch::nn::Conv2dOptions(3, 16, 3).padding(1).bias(false));
  torch::nn::BatchNorm2d norm(16);
  torch::nn::LSTM lstm(torch::nn::LSTMOptions(256, 48).batch_first(true));
  torch::nn::Embedding embedding(20, 48);
  const Tensor images = torch::randn({8, 3, 32, 32}).contiguous(torch::MemoryFormat::ChannelsLast);
  const Tensor indices = torch::randint(20, {8, 16}, torch::kLong);
  std::vector<Tensor> parameters;
  for (const auto& module :
       std::vector<std::shared_ptr<torch::nn::Module>>{conv.ptr(), norm.ptr(), lstm.ptr(), embedding.ptr()}) {
    const auto more = module->parameters();
    parameters.insert(parameters.end(), more.begin(), more.end());
  }
  const auto gradients = [&](std::optional<Compression> compression) {
    Tensor y;
    {
      std::optional<SaveCompressed> scope;
      if (compression) {
        scope.emplace(*compression, CompressOptions{.min_bytes = Bytes(0)});
      }
      Tensor h = torch::max_pool2d(torch::relu(norm->forward(conv->forward(images))), 2);
      h = std::get<0>(lstm->forward(h.view({8, 16, 256}))) + embedding->forward(indices);
      const Tensor qkv = h.view({8, 16, 3, 4, 4}).permute({2, 0, 3, 1, 4});
      y = torch::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0, true).pow(2).mean();
    }
    return torch::autograd::grad({y}, parameters);
  };
  const auto exact = gradients({});
  for (const auto compression : all_compressions()) {
    const auto approximate = gradients(compression);
    for (size_t i = 0; i < exact.size(); ++i) {
      EXPECT_TRUE(approximate[i].isfinite().all().item<bool>());
      EXPECT_GT(exact[i].norm().item<double>(), 0);
      if (compression == Compression::Float16) {
        EXPECT_TRUE(testing::close_in_norm(approximate[i], exact[i], 0.02)) << i;
      }
    }
  }
}

TEST(SaveCompressed, UnderAutocastKeepsTheCopiesOfWeights) {
  const Autocast autocast(torch::kCPU, torch::kBFloat16);
  const Tensor weight = torch::randn({64, 64}, torch::requires_grad());
  const Tensor h = computed(torch::randn({256, 64}));
  Tensor y;
  {
    const SaveCompressed scope(Compression::Int4);
    y = torch::linear(h, weight);
  }
  // h's gradient needs the weight alone, which must not have been touched.
  const Tensor g = torch::ones_like(y);
  const Tensor gradient = torch::autograd::grad({y}, {h}, {g}, true).front();
  EXPECT_TRUE(same_bits(gradient, torch::autograd::grad({torch::linear(h, weight)}, {h}, {g}).front()));
}

TEST(SaveCompressed, AroundACheckpointCompressesItsInputs) {
  const auto x = torch::randn({512, 256}, torch::requires_grad());
  const auto forward = [&] { return checkpoint([](Tensor h) { return h.exp().sin().tanh(); }, x * 1); };
  EXPECT_EQ(bytes_saved({}, forward), 512 * kKiB);
  EXPECT_EQ(bytes_saved(Compression::Int8, forward), 128 * kKiB + 4 * kKiB);
  const auto gradient = [&](bool compressed) {
    std::optional<SaveCompressed> scope;
    if (compressed) {
      scope.emplace(Compression::Int8);
    }
    return torch::autograd::grad({forward().sum()}, {x}).front();
  };
  const Tensor exact = gradient(false);
  EXPECT_LT((gradient(true) - exact).norm().item<double>(), 0.1 * exact.norm().item<double>());
}

TEST(SaveCompressed, WorksWithARetainedGraphAndTwice) {
  const auto x = torch::rand({2000}, torch::requires_grad());
  Tensor y;
  {
    const SaveCompressed scope(Compression::BFloat16);
    y = (x * 1).exp();
  }
  const Tensor expected = y.detach().to(torch::kBFloat16).to(torch::kFloat);
  const Tensor g = torch::ones_like(y);
  EXPECT_TRUE(same_bits(torch::autograd::grad({y}, {x}, {g}, true).front(), expected));
  const Tensor first = torch::autograd::grad({y}, {x}, {g}, true, true).front();
  EXPECT_TRUE(same_bits(torch::autograd::grad({first}, {x}, {g}).front(), expected)) << "exp is its own derivative";
}

// Other devices than the CPU use operators, which can be tried here.
TEST(BlockCodes, OfOperatorsObeyTheBoundsOfTheKernel) {
  torch::manual_seed(1);
  for (const int bits : {8, 4}) {
    for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
      const Tensor x = (torch::randn({64 * 256}) * 3 + 1).to(dtype);
      const auto packed = detail::quantize_with_operators(x, bits, 7);
      ASSERT_TRUE(packed);
      const auto same = detail::quantize_with_operators(x, bits, 7);
      EXPECT_TRUE(same_bits(packed->codes, same->codes));
      EXPECT_FALSE(same_bits(packed->codes, detail::quantize_with_operators(x, bits, 8)->codes));
      const Tensor back = detail::dequantize_with_operators(*packed, x.numel(), torch::kFloat);
      const Tensor bound = bound_of(bits == 8 ? Compression::Int8 : Compression::Int4, x.to(torch::kFloat));
      EXPECT_TRUE(((back - x.to(torch::kFloat)).abs().to(torch::kDouble) <= bound).all().item<bool>());
      // One format: the kernel reads what operators wrote.
      EXPECT_TRUE(same_bits(detail::dequantize_blocks(*packed, x.numel(), torch::kFloat), back));
      const auto kernels_own = detail::quantize_blocks(x, bits, 7);
      EXPECT_TRUE(torch::allclose(kernels_own->ranges, packed->ranges, 1e-6, 0));
    }
    const Tensor odd = torch::randn({1000});
    const auto packed = detail::quantize_with_operators(odd, bits, 0);
    EXPECT_EQ(packed->codes.numel(), 1024 * bits / 8);
    EXPECT_TRUE(torch::allclose(detail::dequantize_with_operators(*packed, 1000, torch::kFloat), odd, 0, 0.5));
    EXPECT_TRUE(detail::quantize_with_operators(torch::ones({300}), bits, 0));
    EXPECT_FALSE(detail::quantize_with_operators(torch::full({300}, INFINITY), bits, 0));
  }
}

}  // namespace
}  // namespace snug::compress_test
