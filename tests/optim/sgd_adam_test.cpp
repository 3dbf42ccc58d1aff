#include <limits>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/grad_scaler.h"
#include "snug/sgd.h"
#include "tests/support/optimizers.h"
#include "tests/support/tensors.h"

namespace snug::sgd_adam_test {
namespace {

using testing::clones_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::large_parameters;
using testing::random_parameters;
using testing::same_bits;
using testing::set_gradients;
using testing::tensors_in;
using testing::train;
using torch::Tensor;

void expect_close(const std::vector<Tensor>& a, const std::vector<Tensor>& b, double bound) {
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_LE((a[i] - b[i]).abs().max().item<double>(), bound) << "parameter " << i;
  }
}

TEST(Adam, EqualsTorchsAdamWithL2InDoublePrecision) {
  auto mine = random_parameters(torch::kDouble);
  auto theirs = random_parameters(torch::kDouble);
  Adam optimizer(mine, {.lr = 0.01, .betas = {0.8, 0.999}, .weight_decay = 0.2});
  torch::optim::Adam reference(theirs, torch::optim::AdamOptions(0.01).betas({0.8, 0.999}).weight_decay(0.2));
  train(optimizer, mine, 1, 50);
  train(reference, theirs, 1, 50);
  expect_close(mine, theirs, 1e-13);
}

struct Case {
  std::string name;
  SGDOptions options;
};

class SGDCases : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(
    All, SGDCases,
    ::testing::Values(Case{"Plain", {.lr = 0.1}}, Case{"Decay", {.lr = 0.1, .weight_decay = 0.3}},
                      Case{"Momentum", {.lr = 0.1, .momentum = 0.9}},
                      Case{"Dampening", {.lr = 0.1, .momentum = 0.9, .dampening = 0.4, .weight_decay = 0.1}},
                      Case{"Nesterov", {.lr = 0.1, .momentum = 0.9, .weight_decay = 0.1, .nesterov = true}}),
    [](const auto& param_info) { return param_info.param.name; });

torch::optim::SGDOptions torchs(const SGDOptions& o) {
  return torch::optim::SGDOptions(o.lr)
      .momentum(o.momentum)
      .dampening(o.dampening)
      .weight_decay(o.weight_decay)
      .nesterov(o.nesterov);
}

TEST_P(SGDCases, EqualsTorchsInDoublePrecision) {
  auto mine = random_parameters(torch::kDouble);
  auto theirs = random_parameters(torch::kDouble);
  SGD optimizer(mine, GetParam().options);
  torch::optim::SGD reference(theirs, torchs(GetParam().options));
  train(optimizer, mine, 1, 20);
  train(reference, theirs, 1, 20);
  expect_close(mine, theirs, 1e-12);
}

// Skipped steps must leave no trace, and least of all the first, whose formula differs with dampening.
TEST_P(SGDCases, AScalersSkippedStepsLeaveNoTrace) {
  const auto run = [&](bool with_skips) {
    auto p = random_parameters();
    SGD optimizer(p, GetParam().options);
    GradScaler scaler({.init_scale = 4, .growth_interval = 1 << 30});
    scaler.scale(torch::ones({}));
    for (uint64_t seed = 1; seed <= 4; ++seed) {
      if (with_skips && seed != 3) {
        set_gradients(p, 100);
        p[1].mutable_grad()[0] = INFINITY;
        EXPECT_FALSE(scaler.step(optimizer));
        scaler.update(4.0);
      }
      set_gradients(p, seed, 4);
      EXPECT_TRUE(scaler.step(optimizer));
      scaler.update(4.0);
    }
    auto all = clones_of(p);
    const auto state = tensors_in(optimizer.state_dict());
    all.insert(all.end(), state.begin(), state.end());
    return all;
  };
  EXPECT_TRUE(same_bits(run(true), run(false)));
}

TEST_P(SGDCases, GoesOnToTheBitAfterLoading) {
  for (const bool as_archive : {false, true}) {
    auto p = random_parameters();
    SGD optimizer(p, GetParam().options);
    train(optimizer, p, 1, 3);
    auto q = random_parameters();
    SGD resumed(q, {.lr = 7});
    for (size_t i = 0; i < p.size(); ++i) {
      q[i].set_data(p[i].detach().clone());
    }
    if (as_archive) {
      std::stringstream stream;
      torch::serialize::OutputArchive out;
      optimizer.save(out);
      out.save_to(stream);
      torch::serialize::InputArchive in;
      in.load_from(stream);
      resumed.load(in);
    } else {
      resumed.load_state_dict(optimizer.state_dict());
    }
    train(optimizer, p, 4, 6);
    train(resumed, q, 4, 6);
    EXPECT_TRUE(same_bits(clones_of(q), clones_of(p)));
  }
}

TEST(SGD, MomentumThatIsTurnedOnLaterBeginsThen) {
  auto p = random_parameters();
  auto q = random_parameters();
  SGD late(p, {.lr = 0.1});
  train(late, p, 1, 2);
  static_cast<torch::optim::SGDOptions&>(late.param_groups()[0].options()).momentum(0.9);
  SGD plain(q, {.lr = 0.1});
  train(plain, q, 1, 2);
  SGD fresh(q, {.lr = 0.1, .momentum = 0.9});
  train(late, p, 3, 5);
  train(fresh, q, 3, 5);
  EXPECT_TRUE(same_bits(clones_of(p), clones_of(q)));
}

// Momentum that was turned on or off since: the state that is saved has a buffer, or none, whatever the options say.
TEST(SGD, LoadsAStateWithOrWithoutBuffersWhateverTheMomentumIsNow) {
  for (const bool buffers : {false, true}) {
    auto p = random_parameters();
    SGD optimizer(p, {.lr = 0.1, .momentum = buffers ? 0.9 : 0});
    train(optimizer, p, 1, 2);
    const auto set_momentum = [](SGD& sgd, double momentum) {
      static_cast<torch::optim::SGDOptions&>(sgd.param_groups()[0].options()).momentum(momentum);
    };
    set_momentum(optimizer, buffers ? 0 : 0.9);
    auto q = clones_of(p);
    for (const Tensor& t : q) {
      t.requires_grad_();
    }
    SGD resumed(q);
    resumed.load_state_dict(optimizer.state_dict());
    for (auto* sgd : {&optimizer, &resumed}) {
      set_momentum(*sgd, 0.9);
    }
    train(optimizer, p, 3, 5);
    train(resumed, q, 3, 5);
    EXPECT_TRUE(same_bits(clones_of(q), clones_of(p)));
  }
}

TEST(SGD, RefusesOptionsOutOfRange) {
  const auto p = random_parameters();
  EXPECT_THAT(error_of<ConfigError>([&] { SGD(p, {.momentum = -1}); }), HasSubstr("momentum is -1"));
  EXPECT_THAT(error_of<ConfigError>([&] { SGD(p, {.nesterov = true}); }), HasSubstr("nesterov"));
  EXPECT_THAT(error_of<ConfigError>([&] { Adam(p, {.betas = {0.9, 1}}); }), HasSubstr("beta2 is 1"));
}

// --- on several threads

// The same whatever the number of threads: that of the parts into which they cut the tensors.
template <class Make>
void expect_same_on_any_number_of_threads(const Make& make) {
  const int threads = at::get_num_threads();
  std::vector<Tensor> expected;
  for (const int n : {1, 2, 3}) {
    at::set_num_threads(n);
    const auto parameters = large_parameters();
    auto optimizer = make(parameters);
    for (uint64_t seed = 1; seed <= 3; ++seed) {
      set_gradients(parameters, seed);
      optimizer.step();
    }
    auto found = clones_of(parameters);
    const auto state = tensors_in(optimizer.state_dict());
    found.insert(found.end(), state.begin(), state.end());
    expected = n == 1 ? found : expected;
    EXPECT_TRUE(same_bits(found, expected)) << n << " threads";
  }
  at::set_num_threads(threads);
}

TEST(Adam, IsTheSameOnAnyNumberOfThreads) {
  expect_same_on_any_number_of_threads([](const auto& p) { return Adam(p, {.lr = 0.01, .weight_decay = 0.1}); });
}

TEST_P(SGDCases, IsTheSameOnAnyNumberOfThreads) {
  expect_same_on_any_number_of_threads([](const auto& p) { return SGD(p, GetParam().options); });
}

TEST(GradScaler, FindsWhatIsNotFiniteAndUnscalesOnAnyNumberOfThreads) {
  const int threads = at::get_num_threads();
  for (const int n : {1, 2, 3}) {
    at::set_num_threads(n);
    for (const bool is_finite : {true, false}) {
      const auto parameters = large_parameters();
      SGD optimizer(parameters, {.lr = 1});
      GradScaler scaler({.init_scale = 4});
      scaler.scale(torch::ones({}));
      set_gradients(parameters, 2);
      const auto gradients = clones_of({parameters[0].grad(), parameters[2].grad()});
      if (!is_finite) {
        parameters[0].mutable_grad()[-1] = std::numeric_limits<float>::infinity();  // in the last part of all
      }
      scaler.unscale_(optimizer);
      EXPECT_TRUE(same_bits(parameters[2].grad(), gradients[1] / 4)) << n;
      EXPECT_TRUE(same_bits(parameters[0].grad().slice(0, 0, -1), (gradients[0] / 4).slice(0, 0, -1))) << n;
      EXPECT_EQ(static_cast<bool>(scaler.step(optimizer)), is_finite) << n << " threads";
    }
  }
  at::set_num_threads(threads);
}

}  // namespace
}  // namespace snug::sgd_adam_test
