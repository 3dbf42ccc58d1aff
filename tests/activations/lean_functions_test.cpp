#include "snug/activations/lean_functions.h"

#include <any>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/activations/checkpoint.h"
#include "snug/activations/compress.h"
#include "snug/activations/lean_cross_entropy.h"
#include "snug/core/error.h"
#include "snug/memory/meter.h"
#include "snug/memory/saved_tensors.h"
#include "snug/precision/autocast.h"
#include "tests/support/tensors.h"

namespace snug::lean_functions_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using ::testing::HasSubstr;
using testing::same_bits;
using torch::Tensor;

using Call = std::function<Tensor(const std::vector<Tensor>&)>;

/// A function of ours and LibTorch's, which must agree to the bit.
struct Pair {
  std::string name;
  Call lean;
  Call plain;
  std::vector<Tensor> inputs;
  int64_t lean_bytes;   ///< that autograd keeps, in FP32
  int64_t plain_bytes;  ///< at least
};

constexpr int64_t kRows = 64, kWidth = 96, kN = kRows * kWidth;

Tensor input(at::IntArrayRef sizes = {kRows, kWidth}) { return torch::randn(sizes); }

std::vector<Pair> pairs() {
  torch::manual_seed(5);
  Tensor special = input();
  special.view({-1})[3] = std::numeric_limits<float>::quiet_NaN();
  special.view({-1})[4] = std::numeric_limits<float>::infinity();
  special.view({-1})[5] = 0;
  special.view({-1})[6] = -0.0f;
  return {
      {"relu",
       [](const auto& x) { return snug::relu(x[0]); },
       [](const auto& x) { return at::relu(x[0]); },
       {special},
       kN / 8,
       4 * kN},
      {"dropout",
       [](const auto& x) { return snug::dropout(x[0], 0.3); },
       [](const auto& x) { return at::dropout(x[0], 0.3, true); },
       {input()},
       kN / 8,
       4 * kN},
      {"rms_norm",
       [](const auto& x) { return snug::rms_norm(x[0], {kWidth}, x[1]); },
       [](const auto& x) { return at::rms_norm(x[0], {kWidth}, x[1]); },
       {input(), input({kWidth})},
       4 * kN,
       8 * kN + 4 * kRows},
      {"rms_norm without a weight",
       [](const auto& x) { return snug::rms_norm(x[0], {kWidth}, {}, 1e-3); },
       [](const auto& x) { return at::rms_norm(x[0], {kWidth}, {}, 1e-3); },
       {input()},
       4 * kN,
       4 * kN + 4 * kRows},
      {"layer_norm",
       [](const auto& x) { return snug::layer_norm(x[0], {kWidth}, x[1], x[2]); },
       [](const auto& x) { return at::layer_norm(x[0], {kWidth}, x[1], x[2]); },
       {input(), input({kWidth}), input({kWidth})},
       4 * kN + 8 * kRows,
       4 * kN + 8 * kRows},
      {"swiglu",
       [](const auto& x) { return snug::swiglu(x[0], x[1]); },
       [](const auto& x) { return at::silu(x[0]) * x[1]; },
       {input(), input()},
       8 * kN,
       12 * kN},
  };
}

struct Result {
  Tensor value;
  std::vector<Tensor> gradients;
};

/// Value, and gradients by the inputs for a gradient of the value that is not all ones. The inputs are not leaves
/// themselves.
Result run(const Call& call, const std::vector<Tensor>& inputs, at::ScalarType dtype = torch::kFloat) {
  torch::manual_seed(6);
  std::vector<Tensor> leaves, computed;
  for (const Tensor& tensor : inputs) {
    leaves.push_back(tensor.detach().to(dtype).clone().requires_grad_());
    computed.push_back(leaves.back() * 1);
  }
  const Tensor value = call(computed);
  const Tensor g = torch::linspace(-1, 1, value.numel()).view(value.sizes()).to(value.scalar_type());
  return {value.detach(), torch::autograd::grad({value}, leaves, {g})};
}

void expect_same(const Result& a, const Result& b) {
  EXPECT_TRUE(same_bits(a.value, b.value));
  EXPECT_TRUE(same_bits(a.gradients, b.gradients));
}

int64_t bytes_saved(const Call& call, const std::vector<Tensor>& inputs, at::ScalarType dtype = torch::kFloat) {
  torch::manual_seed(6);
  std::vector<Tensor> leaves, computed;
  const MemoryMeter meter;
  Tensor value;
  {
    for (const Tensor& tensor : inputs) {
      leaves.push_back(tensor.detach().to(dtype).clone().requires_grad_());
      // A parameter is a leaf; what is larger is computed.
      computed.push_back(tensor.dim() > 1 ? leaves.back() * 1 : leaves.back());
    }
    value = call(computed);
  }
  int64_t parameters = 0;
  for (const Tensor& tensor : computed) {
    parameters += tensor.is_leaf() ? static_cast<int64_t>(tensor.nbytes()) : 0;
  }
  const int64_t saved = meter.report().activations;
  return parameters > 0 ? saved - parameters : saved;
}

TEST(LeanFunctions, GiveValuesAndGradientsOfLibTorchToTheBit) {
  for (const Pair& pair : pairs()) {
    SCOPED_TRACE(pair.name);
    for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf}) {
      SCOPED_TRACE(dtype);
      expect_same(run(pair.lean, pair.inputs, dtype), run(pair.plain, pair.inputs, dtype));
    }
  }
}

TEST(LeanFunctions, KeepTheBytesOfTheTable) {
  for (const Pair& pair : pairs()) {
    SCOPED_TRACE(pair.name);
    EXPECT_EQ(bytes_saved(pair.lean, pair.inputs), pair.lean_bytes);
    EXPECT_GE(bytes_saved(pair.plain, pair.inputs), pair.plain_bytes);
  }
}

TEST(LeanFunctions, TakeViewsAndOddShapes) {
  const Tensor odd = torch::randn({7, 5, 3});
  const auto on = [](const Call& call) {
    return [call](const std::vector<Tensor>& x) { return call({x[0].transpose(0, 2).slice(1, 1, 4)}); };
  };
  for (const Pair& pair : pairs()) {
    if (pair.name == "relu" || pair.name == "dropout") {
      SCOPED_TRACE(pair.name);
      expect_same(run(on(pair.lean), {odd}), run(on(pair.plain), {odd}));
    }
  }
  const Tensor empty = torch::zeros({0, 3}, torch::requires_grad());
  EXPECT_EQ(snug::relu(empty).numel() + snug::dropout(empty, 0.5).numel(), 0);
}

TEST(LeanFunctions, AreTheSameInsideACheckpoint) {
  for (const Pair& pair : pairs()) {
    SCOPED_TRACE(pair.name);
    const Call inside = [&](const std::vector<Tensor>& x) {
      return checkpoint([call = pair.lean](const std::vector<Tensor>& h) { return call(h).sin(); }, x);
    };
    const Call plain = [&](const std::vector<Tensor>& x) { return pair.plain(x).sin(); };
    expect_same(run(inside, pair.inputs), run(plain, pair.inputs));
  }
}

TEST(LeanFunctions, AreTheSameUnderAutocast) {
  for (const bool fp32_reductions : {false, true}) {
    for (const Pair& pair : pairs()) {
      SCOPED_TRACE(pair.name);
      const auto cast = [&](const Call& call) {
        return [&, call](std::vector<Tensor> x) {
          const Autocast autocast(torch::kCPU, torch::kBFloat16, {.fp32_reductions = fp32_reductions});
          x[0] = torch::matmul(x[0], torch::eye(kWidth));  // now BF16
          return call(x);
        };
      };
      if (pair.name == "swiglu") {
        continue;  // its second input would have another type; see below
      }
      const auto lean = run(cast(pair.lean), pair.inputs);
      expect_same(lean, run(cast(pair.plain), pair.inputs));
    }
  }
}

TEST(LeanFunctions, LayerNormKeepsNoCastUnderAnAutocastThatNormalisesInFloat) {
  const auto cast = [](const auto& norm) {
    return [norm](const std::vector<Tensor>& x) {
      const Autocast autocast(torch::kCPU, torch::kBFloat16, {.fp32_reductions = true});
      return norm(x[0]);
    };
  };
  const auto lean = cast([](const Tensor& x) { return snug::layer_norm(x, {kWidth}); });
  const auto plain = cast([](const Tensor& x) { return at::layer_norm(x, {kWidth}); });
  const Tensor x = input();
  expect_same(run(lean, {x}, torch::kBFloat16), run(plain, {x}, torch::kBFloat16));
  EXPECT_EQ(bytes_saved(plain, {x}, torch::kBFloat16), 4 * kN + 8 * kRows) << "the cast";
  EXPECT_EQ(bytes_saved(lean, {x}, torch::kBFloat16), 2 * kN);
}

// Lossy are only the inputs that rms_norm and swiglu keep; masks are exact.
TEST(LeanFunctions, WorkUnderSaveCompressed) {
  for (const Pair& pair : pairs()) {
    SCOPED_TRACE(pair.name);
    const Call compressed = [&](const std::vector<Tensor>& x) {
      const SaveCompressed scope(Compression::Int8);
      return pair.lean(x);
    };
    const Result lean = run(compressed, pair.inputs);
    const Result plain = run(pair.plain, pair.inputs);
    EXPECT_TRUE(same_bits(lean.value, plain.value));
    if (pair.name == "relu" || pair.name == "dropout") {
      EXPECT_TRUE(same_bits(lean.gradients, plain.gradients));
    }
    for (size_t i = 0; i < lean.gradients.size(); ++i) {
      EXPECT_TRUE(testing::close_in_norm(lean.gradients[i], plain.gradients[i], 0.02)) << i;
    }
  }
}

TEST(LeanFunctions, CanBeDifferentiatedTwice) {
  for (const Pair& pair : pairs()) {
    SCOPED_TRACE(pair.name);
    const auto second = [&](const Call& call) {
      torch::manual_seed(6);
      std::vector<Tensor> leaves;
      for (const Tensor& tensor : pair.inputs) {
        leaves.push_back(tensor.nan_to_num(0, 1, 1).requires_grad_());
      }
      const Tensor value = call(leaves);
      const Tensor g = torch::ones_like(value).requires_grad_();
      const auto first = torch::autograd::grad({value.sin()}, leaves, {g}, true, true);
      Tensor sum = torch::zeros({});
      for (const Tensor& gradient : first) {
        sum = sum + gradient.pow(2).sum();
      }
      leaves.push_back(g);
      return torch::autograd::grad({sum}, leaves);
    };
    EXPECT_TRUE(same_bits(second(pair.lean), second(pair.plain)));
  }
}

TEST(LeanFunctions, DropoutAtItsEndsAndOutsideTrainingIsLibTorchs) {
  const Tensor x = input().requires_grad_();
  for (const double p : {0.0, 1.0}) {
    EXPECT_TRUE(same_bits(snug::dropout(x, p), at::dropout(x, p, true)));
  }
  EXPECT_TRUE(same_bits(snug::dropout(x, 0.5, false), x));
  EXPECT_THROW(snug::dropout(x, 1.5), c10::Error);
  torch::manual_seed(1);
  const Tensor with_gradient = snug::dropout(x, 0.5);
  torch::manual_seed(1);
  EXPECT_TRUE(same_bits(snug::dropout(x.detach(), 0.5), with_gradient));
}

// The functions that LibTorch has as lean as can be, which is why there are none of ours.
TEST(LibTorch, KeepsOneTensorForThePointwiseFunctionsAndSoftmax) {
  const std::map<std::string, std::function<Tensor(const Tensor&)>> functions{
      {"gelu", [](const Tensor& x) { return at::gelu(x); }},
      {"gelu with tanh", [](const Tensor& x) { return at::gelu(x, "tanh"); }},
      {"silu", [](const Tensor& x) { return at::silu(x); }},
      {"mish", [](const Tensor& x) { return at::mish(x); }},
      {"elu", [](const Tensor& x) { return at::elu(x); }},
      {"softplus", [](const Tensor& x) { return at::softplus(x); }},
      {"hardtanh", [](const Tensor& x) { return at::hardtanh(x); }},
      {"softmax", [](const Tensor& x) { return at::softmax(x, -1); }},
      {"log_softmax", [](const Tensor& x) { return at::log_softmax(x, -1); }},
      {"sigmoid", [](const Tensor& x) { return at::sigmoid(x); }},
      {"tanh", [](const Tensor& x) { return at::tanh(x); }},
  };
  for (const auto& [name, function] : functions) {
    for (const auto dtype : {torch::kFloat, torch::kBFloat16}) {
      const Tensor x = input().to(dtype).requires_grad_() * 1;
      std::vector<const void*> kept;
      Tensor y;
      {
        const SavedTensorHooks hooks(
            [&](const Tensor& t) {
              kept.push_back(t.const_data_ptr());
              return std::any(t.detach());
            },
            [](std::any& packed) { return std::any_cast<Tensor>(packed); });
        y = function(x);
      }
      ASSERT_EQ(kept.size(), 1U) << name;
      EXPECT_TRUE(kept[0] == x.const_data_ptr() || kept[0] == y.const_data_ptr()) << name;
    }
  }
}

struct Loss {
  static constexpr int64_t kItems = 101, kClasses = 37;
  Tensor logits, target;
  Loss() {
    torch::manual_seed(8);
    logits = torch::randn({kItems, kClasses}) * 3;
    target = torch::randint(kClasses, {kItems}, torch::kLong);
  }
  Call lean(CrossEntropyOptions o) const {
    return [o, t = target](const auto& x) { return cross_entropy(x[0], t, o); };
  }
  Call plain(CrossEntropyOptions o) const {
    return [o, t = target](const auto& x) {
      return at::cross_entropy_loss(x[0].to(x[0].scalar_type() == torch::kDouble ? torch::kDouble : torch::kFloat), t,
                                    {}, o.reduction == Reduction::Mean ? at::Reduction::Mean : at::Reduction::Sum,
                                    o.ignore_index, o.label_smoothing);
    };
  }
};

TEST(LeanCrossEntropy, GivesLossAndGradientsOfLibTorchToTheBit) {
  Loss loss;
  loss.target.slice(0, 10, 20).fill_(-100);
  for (const auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf}) {
    for (const auto reduction : {Reduction::Sum, Reduction::Mean}) {
      for (const int64_t ignore : {-100, 0, 5}) {
        loss.target.slice(0, 10, 20).fill_(ignore);
        for (const double smoothing : {0.0, 0.1, 1.0}) {
          const CrossEntropyOptions options{reduction, ignore, smoothing};
          expect_same(run(loss.lean(options), {loss.logits}, dtype), run(loss.plain(options), {loss.logits}, dtype));
        }
      }
    }
  }
}

// 3 * 2^20 logits: several groups of rows, the last of them smaller.
TEST(LeanCrossEntropy, InSeveralGroupsOfRowsIsTheSameToTheBit) {
  torch::manual_seed(9);
  for (const int64_t classes : {1000, 50257}) {
    Loss loss;
    loss.logits = torch::randn({3 * (1 << 20) / classes + 1, classes});
    loss.target = torch::randint(classes, {loss.logits.size(0)}, torch::kLong);
    const CrossEntropyOptions options{.reduction = Reduction::Mean};
    expect_same(run(loss.lean(options), {loss.logits}), run(loss.plain(options), {loss.logits}));
  }
}

TEST(LeanCrossEntropy, KeepsTheLogitsAndPeaksAtTwiceTheirBytes) {
  torch::manual_seed(9);
  constexpr int64_t kItems = 4096, kClasses = 2048, kBytes = kItems * kClasses * 2;
  const Tensor leaf = torch::randn({kItems, kClasses}).to(torch::kBFloat16).requires_grad_();
  const Tensor target = torch::randint(kClasses, {kItems}, torch::kLong);
  const auto peak = [&](bool lean) {
    const MemoryMeter meter;
    const Tensor logits = leaf * 1;
    const Tensor loss = lean ? cross_entropy(logits, target)
                             : at::cross_entropy_loss(logits.to(torch::kFloat), target, {}, at::Reduction::Sum);
    torch::autograd::grad({loss}, {logits});
    return meter.report().peak_bytes;
  };
  // A group is 2^20 FP32 elements, and there are at most four such matrices at a time.
  EXPECT_LE(peak(true), 2 * kBytes + 4 * (4 << 20) + 64 * kItems);
  EXPECT_GE(peak(false), 7 * kBytes) << "logits; log-probabilities and two gradients in FP32";
}

TEST(LeanCrossEntropy, TakesLeadingSizesAutocastCheckpointAndCompression) {
  const Loss loss;
  const Tensor logits = torch::randn({4, 6, 300});
  const Tensor target = torch::randint(300, {4, 6}, torch::kLong);
  const Call lean = [&](const auto& x) { return cross_entropy(x[0], target); };
  const Call plain = [&](const auto& x) {
    return at::cross_entropy_loss(x[0].view({24, 300}).to(torch::kFloat), target.view({-1}), {}, at::Reduction::Sum);
  };
  const Result expected = run(plain, {logits});
  expect_same(run(lean, {logits}), expected);
  expect_same(run([&](const auto& x) { return checkpoint(lean, x); }, {logits}), expected);
  const auto cast = [](const Call& call) {
    return [call](const std::vector<Tensor>& x) {
      const Autocast autocast(torch::kCPU, torch::kBFloat16);
      return call({torch::matmul(x[0], torch::eye(300))});
    };
  };
  expect_same(run(cast(lean), {logits}), run(cast(plain), {logits}));
  const Result compressed = run(
      [&](const auto& x) {
        const SaveCompressed scope(Compression::BFloat16);
        return lean(x);
      },
      {logits});
  EXPECT_TRUE(testing::close_in_norm(compressed.gradients[0], expected.gradients[0], 0.05));
  EXPECT_FALSE(same_bits(compressed.gradients[0], expected.gradients[0]));
}

TEST(LeanCrossEntropy, CanBeDifferentiatedTwice) {
  const Loss loss;
  const auto second = [&](const Call& call) {
    const Tensor x = loss.logits.clone().requires_grad_();
    const Tensor first = torch::autograd::grad({call({x}).pow(2)}, {x}, {}, true, true).front();
    return torch::autograd::grad({first.pow(2).sum()}, {x}).front();
  };
  // Of the same terms, which the two graphs add in another order.
  EXPECT_TRUE(testing::close_in_norm(second(loss.lean({})), second(loss.plain({})), 1e-5));
}

TEST(LeanCrossEntropy, OfIgnoredTargetsOnlyIsZeroAsSumAndNanAsMean) {
  Loss loss;
  loss.target.fill_(-100);
  EXPECT_EQ(cross_entropy(loss.logits, loss.target).item<float>(), 0);
  EXPECT_TRUE(cross_entropy(loss.logits, loss.target, {.reduction = Reduction::Mean}).isnan().item<bool>());
  EXPECT_EQ(cross_entropy(torch::zeros({0, 5}), torch::zeros({0}, torch::kLong)).item<float>(), 0);
}

TEST(LeanCrossEntropy, RefusesShapesThatDoNotFitAndNamesThem) {
  const Loss loss;
  const auto message = [](const Tensor& logits, const Tensor& target, CrossEntropyOptions options = {}) {
    return error_of<ConfigError>([&] { cross_entropy(logits, target, options); });
  };
  EXPECT_THAT(message(loss.logits, loss.target.slice(0, 1)), AllOf(HasSubstr("Long [100]"), HasSubstr("[101, 37]")));
  EXPECT_THAT(message(loss.logits, loss.target.to(torch::kInt)), HasSubstr("Int [101]"));
  EXPECT_THAT(message(loss.logits.to(torch::kLong), loss.target), HasSubstr("logits are Long"));
  EXPECT_THAT(message(loss.logits, loss.target, {.label_smoothing = 2}), HasSubstr("label_smoothing is 2"));
  EXPECT_THROW(cross_entropy(loss.logits, loss.target.add(37)), c10::Error);
}

}  // namespace
}  // namespace snug::lean_functions_test
