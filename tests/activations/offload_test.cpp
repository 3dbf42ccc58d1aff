#include "snug/offload.h"

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include "program/models/gpt.h"
#include "snug/checkpoint.h"
#include "snug/core.h"
#include "snug/memory.h"
#include "snug/stepper.h"
#include "tests/support/late_writes.h"
#include "tests/support/random_model.h"
#include "tests/support/small_models.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

namespace snug::offload_test {
namespace {

using ::testing::AllOf;
using testing::error_of;
using testing::gradients_of;
using ::testing::HasSubstr;
using testing::same_bits;
using testing::TemporaryFolder;
using torch::Tensor;

constexpr int64_t kKiB = 1024;

// The open file without a name in `folder`.
std::filesystem::path spill_file_in(const TemporaryFolder& folder) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const auto target = std::filesystem::read_symlink(entry.path(), gone);
    if (target.string().starts_with(folder.path().string())) {
      return entry.path();
    }
  }
  return {};
}

int64_t size_of(const std::filesystem::path& file) { return static_cast<int64_t>(std::filesystem::file_size(file)); }

// Blocks of Linear, GELU, Linear, GELU, whose activations are all of the same size. A block saves four: its input, what
// goes into each GELU, and what goes into its second Linear.
struct Blocks {
  static constexpr int64_t kRows = 512, kWidth = 64, kSavedInABlock = 4;
  static constexpr int64_t kActivation = kRows * kWidth * 4;

  explicit Blocks(int64_t number, const std::filesystem::path& folder)
      : options{Bytes(kActivation), Bytes::unlimited(), folder} {
    torch::manual_seed(3);
    for (int64_t i = 0; i < number; ++i) {
      blocks.emplace_back(torch::nn::Linear(kWidth, kWidth), torch::nn::GELU(), torch::nn::Linear(kWidth, kWidth),
                          torch::nn::GELU());
      for (const Tensor& parameter : blocks.back()->parameters()) {
        parameters.push_back(parameter);
      }
    }
    x = torch::rand({kRows, kWidth});
  }

  Tensor loss(bool recompute) const {
    Tensor h = x;
    for (auto block : blocks) {
      auto run = [block](const Tensor& t) mutable { return block->forward(t); };
      h = recompute ? checkpoint(run, h) : run(h);
    }
    return h.square().mean();
  }

  struct Outcome {
    std::vector<Tensor> gradients;
    MemoryMeter::Report memory;
    SaveOnHost::Report offload;
  };
  Outcome forward_and_backward(bool recompute, bool offload) {
    for (Tensor& parameter : parameters) {
      parameter.mutable_grad().reset();
    }
    const MemoryMeter meter;
    std::optional<SaveOnHost> guard;
    if (offload) {
      guard.emplace(options);
    }
    loss(recompute).backward();
    return {gradients_of(parameters), meter.report(), guard ? guard->report() : SaveOnHost::Report{}};
  }

  OffloadOptions options;
  std::vector<torch::nn::Sequential> blocks;
  std::vector<Tensor> parameters;
  Tensor x;
};

// The gradients of whatever `make_loss` depends on among `leaves`, with and without offload of everything.
void expect_same_gradients(const std::vector<Tensor>& leaves, const std::function<Tensor()>& make_loss) {
  const auto gradients = [&](bool offload) {
    torch::manual_seed(5);
    std::optional<SaveOnHost> guard;
    if (offload) {
      guard.emplace(OffloadOptions{.min_bytes = Bytes(1)});
    }
    const Tensor loss = make_loss();
    auto found = torch::autograd::grad({loss}, leaves, {}, /*retain_graph=*/true);
    const auto again = torch::autograd::grad({loss}, leaves);
    found.insert(found.end(), again.begin(), again.end());
    if (guard) {
      EXPECT_GT(guard->report().bytes_out, 0);
    }
    return found;
  };
  EXPECT_TRUE(same_bits(gradients(true), gradients(false)));
}

TEST(SaveOnHost, GradientsAreEqualToTheBitAlsoOfARetainedGraph) {
  torch::manual_seed(1);
  torch::nn::Sequential convolutions(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3).padding(1)),
                                     torch::nn::BatchNorm2d(8), torch::nn::ReLU(torch::nn::ReLUOptions(true)),
                                     torch::nn::Dropout(0.3), torch::nn::MaxPool2d(2), torch::nn::Flatten(),
                                     torch::nn::Linear(8 * 16, 5));
  const Tensor images = torch::rand({4, 3, 8, 8}, torch::requires_grad());
  auto leaves = convolutions->parameters();
  leaves.push_back(images);
  expect_same_gradients(leaves, [&] { return convolutions->forward(images).logsumexp(1).sum(); });

  testing::Attention attention(16, 0.2);
  const Tensor words = torch::rand({2, 7, 16});
  expect_same_gradients(attention->parameters(), [&] { return attention->forward(words).square().sum(); });

  torch::nn::LSTM lstm(torch::nn::LSTMOptions(6, 5).num_layers(2).dropout(0.2));
  const Tensor sequence = torch::rand({9, 3, 6});
  expect_same_gradients(lstm->parameters(), [&] { return std::get<0>(lstm->forward(sequence)).sum(); });
}

TEST(SaveOnHost, StridesOffsetsAndTypesComeBack) {
  const Tensor x = torch::rand({6, 8, 10}, torch::requires_grad());
  expect_same_gradients({x}, [&] {
    const Tensor y = x.exp();
    const Tensor corner = y.slice(0, 1, 5).transpose(0, 2).slice(1, 2, 7, 2);
    const Tensor narrow = y.to(torch::kBFloat16).permute({2, 1, 0});
    const Tensor complex = torch::complex(y, y + 1).conj();
    return (corner * corner.sin()).sum() + (y[3].t() * y[2].expand({8, 10}).t()).sum() +
           narrow.square().sum().to(torch::kFloat) + torch::real(complex * complex * complex).sum();
  });
}

TEST(SaveOnHost, OfAModelOnlyActivationsLeaveAndEachOfThemOnce) {
  const TemporaryFolder folder;
  Blocks model(4, folder.path());
  model.options.min_bytes = Bytes(1);
  const auto plain = model.forward_and_backward(false, false);
  const auto outcome = model.forward_and_backward(false, true);
  EXPECT_TRUE(same_bits(outcome.gradients, plain.gradients));
  const int64_t all = (4 * Blocks::kSavedInABlock + 1) * Blocks::kActivation;  // and one for the loss
  EXPECT_LE(outcome.offload.bytes_out, all) << "no weights, no transposed weights";
  EXPECT_GE(outcome.offload.bytes_out, all - 3 * Blocks::kActivation)
      << "but for what backward took before it was written";
  EXPECT_LE(outcome.offload.bytes_back, outcome.offload.bytes_out) << "nothing is read twice";
  EXPECT_EQ(outcome.offload.bytes_kept, 0);
}

TEST(SaveOnHost, SeveralViewsOfATensorShareOneCopy) {
  const TemporaryFolder folder;
  const Tensor x = torch::rand({64, 64}, torch::requires_grad());
  const Tensor expected = 4 * (2 * x).cos() - 2 * (2 * x).sin();
  const SaveOnHost offload({.min_bytes = Bytes(4 * kKiB), .directory = folder.path()});
  const Tensor y = x * 2;
  Tensor sum = y.sin().sum() + y.cos().sum();
  for (const Tensor& part : y.chunk(4, 1)) {
    sum = sum + part.sin().sum();
  }
  while (offload.report().bytes_out == 0) {
  }
  EXPECT_EQ(size_of(spill_file_in(folder)), 16 * kKiB);
  const MemoryMeter meter;
  sum.backward();
  EXPECT_LT(meter.report().peak_bytes, 8 * 16 * kKiB);
  EXPECT_TRUE(torch::allclose(x.grad(), expected));
  EXPECT_EQ(offload.report().bytes_out, 16 * kKiB);
  EXPECT_EQ(offload.report().bytes_back, 16 * kKiB) << "and are read once";
}

// Queries, keys and values are on one of two storages.
TEST(SaveOnHost, AttentionReadsEachStorageOnce) {
  const Tensor x = torch::rand({1, 64, 3, 2, 32}, torch::requires_grad());
  const SaveOnHost offload({.min_bytes = Bytes(16 * kKiB)});
  const auto parts = (x * 2).transpose(1, 3).unbind(2);
  const Tensor sum = at::scaled_dot_product_attention(parts[0], parts[1], parts[2]).sum();
  while (offload.report().bytes_out < 4 * 16 * kKiB) {
  }
  sum.backward();
  EXPECT_EQ(offload.report().bytes_out, 4 * 16 * kKiB);
  EXPECT_EQ(offload.report().bytes_back, 4 * 16 * kKiB);
}

TEST(SaveOnHost, SlicesOfABatchAndSmallTensorsStay) {
  const SaveOnHost offload({.min_bytes = Bytes(4 * kKiB)});
  const Tensor batch = torch::rand({64, 64});
  const Tensor weight = torch::rand({64, 2}, torch::requires_grad());
  const Tensor loss = torch::mm(batch.slice(0, 8, 16), weight).square().sum();
  loss.backward();
  EXPECT_EQ(offload.report().bytes_out + offload.report().bytes_kept, 0);
}

// The tensor is one storage in memory and two in the file.
TEST(SaveOnHost, ATensorThatIsWrittenBetweenTwoSavesIsSavedTwice) {
  const Tensor x = torch::rand({64, 64}, torch::requires_grad());
  const SaveOnHost offload({.min_bytes = Bytes(1)});
  const Tensor y = x * 2;
  const Tensor stale = y.sin();
  y.add_(1);
  const Tensor good = y.sin();
  const auto gradient = torch::autograd::grad({good.sum()}, {x})[0];
  EXPECT_TRUE(same_bits(gradient, 2 * (2 * x + 1).cos()));
  EXPECT_THAT(error_of<c10::Error>([&] { stale.sum().backward(); }), HasSubstr("modified by an inplace operation"));
}

// Autograd takes a gradient that nobody else holds for its own, and adds to it.
class SavedAsGradient : public torch::autograd::Function<SavedAsGradient> {
 public:
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x) {
    context->save_for_backward({x * 3});
    return (x * x).sum();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list) {
    return {context->get_saved_variables()[0]};
  }
};

TEST(SaveOnHost, ASavedTensorThatBecomesAGradientIsNotAddedTo) {
  const Tensor x = torch::ones({64, 64}, torch::requires_grad());
  const SaveOnHost offload({.min_bytes = Bytes(1)});
  const Tensor loss = SavedAsGradient::apply(x);
  for (int pass = 1; pass <= 4; ++pass) {
    loss.backward({}, /*retain_graph=*/true);
    EXPECT_TRUE(same_bits(x.grad(), torch::full({64, 64}, 3.0f * static_cast<float>(pass))));
  }
}

TEST(SaveOnHost, MemoryNoLongerGrowsWithTheNumberOfBlocks) {
  const TemporaryFolder folder;
  Blocks model(12, folder.path());
  const int64_t gradients = testing::bytes_of(model.parameters);
  const auto plain = model.forward_and_backward(false, false);
  const auto offloaded = model.forward_and_backward(false, true);
  EXPECT_TRUE(same_bits(offloaded.gradients, plain.gradients));
  EXPECT_GE(plain.memory.peak_bytes, 48 * Blocks::kActivation);
  // Two in flight, operands and result of an operation; in backward one given back, one ahead, the gradients in and
  // out.
  EXPECT_LE(offloaded.memory.peak_bytes, 7 * Blocks::kActivation + gradients);
  EXPECT_EQ(offloaded.memory.live_bytes, plain.memory.live_bytes);
}

TEST(SaveOnHost, TakesTheInputsOfCheckpointedRegions) {
  const TemporaryFolder folder;
  Blocks model(12, folder.path());
  const int64_t gradients = testing::bytes_of(model.parameters);
  const auto plain = model.forward_and_backward(false, false);
  const auto offloaded = model.forward_and_backward(false, true);
  const auto recomputed = model.forward_and_backward(true, false);
  const auto both = model.forward_and_backward(true, true);
  EXPECT_TRUE(same_bits(recomputed.gradients, plain.gradients));
  EXPECT_TRUE(same_bits(both.gradients, plain.gradients));
  EXPECT_LT(both.memory.peak_bytes, recomputed.memory.peak_bytes - 4 * Blocks::kActivation);
  EXPECT_LE(both.memory.peak_bytes, (Blocks::kSavedInABlock + 6) * Blocks::kActivation + gradients);
  EXPECT_LE(both.offload.bytes_out, 13 * Blocks::kActivation) << "the inputs, and one for the loss";
  EXPECT_LT(both.offload.bytes_out, offloaded.offload.bytes_out / 3);
}

TEST(SaveOnHost, AModelThreeTimesAsLargeAsTheLimitTrainsUnderIt) {
  const TemporaryFolder folder;
  const auto losses = [&](bool recompute, bool offload, Bytes limit) {
    Blocks model(40, folder.path());
    torch::optim::SGD optimizer(model.parameters, torch::optim::SGDOptions(0.1));
    const MemoryLimit cap(torch::kCPU,
                          limit.is_unlimited() ? limit : Bytes(live_bytes(torch::kCPU).count() + limit.count()));
    std::vector<Tensor> seen;
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      std::optional<SaveOnHost> guard;
      if (offload) {
        guard.emplace(model.options);
      }
      const Tensor loss = model.loss(recompute);
      loss.backward();
      optimizer.step();
      seen.push_back(loss.detach());
    }
    return seen;
  };
  const Blocks model(40, folder.path());
  const int64_t saved = 40 * Blocks::kSavedInABlock * Blocks::kActivation;
  const Bytes limit(saved / 3);
  ASSERT_GT(limit.count(), testing::bytes_of(model.parameters));
  const auto expected = losses(false, false, Bytes::unlimited());
  EXPECT_THROW(losses(false, false, limit), c10::OutOfMemoryError);
  EXPECT_TRUE(same_bits(losses(true, false, limit), expected));
  EXPECT_TRUE(same_bits(losses(false, true, limit), expected));
  EXPECT_TRUE(same_bits(losses(true, true, limit), expected));
  // Together they need less than recomputation alone, which keeps 40 inputs. Offload alone needs no more than the two,
  // which hold a recomputed block, but moves four times the bytes (see TakesTheInputsOfCheckpointedRegions).
  const Bytes smaller(30 * Blocks::kActivation + testing::bytes_of(model.parameters));
  ASSERT_LT(smaller, limit);
  EXPECT_THROW(losses(true, false, smaller), c10::OutOfMemoryError);
  EXPECT_TRUE(same_bits(losses(true, true, smaller), expected));
}

TEST(SaveOnHost, TheFileDoesNotGrowFromStepToStep) {
  const TemporaryFolder folder;
  Blocks model(4, folder.path());
  const SaveOnHost offload(model.options);
  const auto file = spill_file_in(folder);
  for (int step = 0; step < 10; ++step) {
    const Tensor loss = model.loss(false);
    if (step % 2 == 0) {
      loss.backward();
    }  // else the graph is dropped
    EXPECT_LE(size_of(file), 17 * Blocks::kActivation);
  }
}

TEST(SaveOnHost, GraphsOutliveTheGuard) {
  const Tensor x = torch::rand({64, 64}, torch::requires_grad());
  Tensor loss;
  {
    const SaveOnHost offload({.min_bytes = Bytes(1)});
    loss = (x * 2).sin().sum();
  }
  loss.backward();
  EXPECT_TRUE(same_bits(x.grad(), 2 * (2 * x).cos()));
}

TEST(SaveOnHost, GradientsOfGradientsAreTheSame) {
  const auto gradients = [](bool offload) {
    auto model = testing::make_mlp({8, 16, 16, 1});
    const Tensor x = torch::linspace(-1, 1, 64).view({8, 8}).requires_grad_();
    std::optional<SaveOnHost> guard;
    if (offload) {
      guard.emplace(OffloadOptions{.min_bytes = Bytes(1)});
    }
    const Tensor slope = torch::autograd::grad({model->forward(x).sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    slope.square().sum().backward();
    return gradients_of(*model);
  };
  EXPECT_TRUE(same_bits(gradients(true), gradients(false)));
}

// The region sees nothing of what its guard takes.
TEST(SaveOnHost, WorksInsideACheckpointedRegion) {
  const Tensor x = torch::rand({64, 64}, torch::requires_grad());
  const auto gradient = [&](bool offload) {
    const Tensor y = checkpoint(
        [offload](const Tensor& t) {
          const Tensor u = t.sin();
          std::optional<SaveOnHost> guard;
          if (offload) {
            guard.emplace(OffloadOptions{.min_bytes = Bytes(1)});
          }
          return u.exp().cos();
        },
        x);
    return torch::autograd::grad({y.sum()}, {x})[0];
  };
  EXPECT_TRUE(same_bits(gradient(true), gradient(false)));
}

TEST(SaveOnHost, PastTheCapTensorsStay) {
  const TemporaryFolder folder;
  Blocks model(4, folder.path());
  model.options.cap = Bytes(5 * Blocks::kActivation);
  const auto plain = model.forward_and_backward(false, false);
  const auto outcome = model.forward_and_backward(false, true);
  EXPECT_TRUE(same_bits(outcome.gradients, plain.gradients));
  EXPECT_LE(outcome.offload.bytes_out, 5 * Blocks::kActivation);
  EXPECT_EQ(outcome.offload.bytes_kept, 12 * Blocks::kActivation);
}

TEST(SaveOnHost, WhatTheDiskDoesNotTakeStaysInMemory) {
  const TemporaryFolder folder;
  Blocks model(4, folder.path());
  const auto plain = model.forward_and_backward(false, false);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{static_cast<rlim_t>(5 * Blocks::kActivation + 1000), before.rlim_max};
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto outcome = model.forward_and_backward(false, true);
  ::setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, old_handler);
  EXPECT_TRUE(same_bits(outcome.gradients, plain.gradients));
  EXPECT_GT(outcome.offload.failed_writes, 0);
  EXPECT_EQ(outcome.offload.bytes_kept, outcome.offload.failed_writes * Blocks::kActivation);
  EXPECT_THAT(outcome.offload.failure, AllOf(HasSubstr(folder.path().string()), HasSubstr("File too large")));
}

TEST(SaveOnHost, ATensorThatCannotBeReadBackIsAnErrorInBackward) {
  const TemporaryFolder folder;
  Blocks model(4, folder.path());
  const SaveOnHost offload(model.options);
  const Tensor loss = model.loss(false);
  while (offload.report().bytes_out < 17 * Blocks::kActivation) {
  }
  std::filesystem::resize_file(spill_file_in(folder), 2 * Blocks::kActivation);
  EXPECT_THAT(error_of<Error>([&] { loss.backward(); }),
              AllOf(HasSubstr("cannot read 128.00 KiB back"), HasSubstr(folder.path().string()), HasSubstr("shorter")));
}

TEST(SaveOnHost, OptionsThatCannotWorkAreErrors) {
  EXPECT_THAT(error_of<ConfigError>([] { SaveOnHost({.min_bytes = Bytes(100), .cap = Bytes(99)}); }),
              AllOf(HasSubstr("cap is 99 B"), HasSubstr("min_bytes is 100 B")));
  EXPECT_THAT(error_of<Error>([] { SaveOnHost({.directory = "/absent/folder"}); }), HasSubstr("/absent/folder"));
}

// The second save must not get the copy of the shorter storage.
TEST(SaveOnHost, CopiesAStorageThatHasGrownUnseenBetweenTwoSaves) {
  constexpr int64_t kItems = 4096;
  const Tensor weight = torch::ones({kItems}, torch::requires_grad());
  const Tensor longer_weight = torch::ones({2 * kItems}, torch::requires_grad());
  const TemporaryFolder folder;
  Tensor loss;
  {
    const Tensor values = torch::full({kItems}, 2.0F);
    const SaveOnHost offload({.min_bytes = Bytes(1), .directory = folder.path()});
    loss = (weight * values).sum();
    const c10::Storage storage = values.storage();
    c10::DataPtr grown = storage.allocator()->allocate(2 * storage.nbytes());
    std::fill_n(static_cast<float*>(grown.get()), 2 * kItems, 3.0F);
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(2 * storage.nbytes());
    const Tensor longer = torch::empty({0}).set_(storage, 0, {2 * kItems}, {1});
    loss = loss + (longer_weight * longer).sum();
  }
  loss.backward();
  EXPECT_TRUE(same_bits(longer_weight.grad(), torch::full({2 * kItems}, 3.0F)));
}

}  // namespace
}  // namespace snug::offload_test
