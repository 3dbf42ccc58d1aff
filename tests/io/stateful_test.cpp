#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/optimizer.h"
#include "snug/snapshot.h"
#include "src/io/state_json.h"
#include "tests/support/temporary_folder.h"

namespace snug::stateful_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::TemporaryFolder;
using ::testing::ThrowsMessage;
using torch::Tensor;

torch::nn::Sequential small_net(uint64_t seed, int64_t width = 5) {
  torch::manual_seed(seed);
  return torch::nn::Sequential(torch::nn::Linear(3, width), torch::nn::BatchNorm1d(width), torch::nn::Linear(width, 2));
}

std::vector<std::string> names_of(const StateDict& state) {
  std::vector<std::string> names;
  for (const StateDict::Entry& entry : state.entries()) {
    names.push_back(entry.name);
  }
  return names;
}

std::vector<Tensor> copies_of(const torch::nn::Module& module) {
  std::vector<Tensor> copies;
  for (const Tensor& tensor : module.parameters()) {
    copies.push_back(tensor.detach().clone());
  }
  for (const Tensor& tensor : module.buffers()) {
    copies.push_back(tensor.clone());
  }
  return copies;
}

void expect_equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(torch::equal(a[i], b[i])) << i;
  }
}

// -------------------------------------------------------------------------------------- modules

TEST(StatefulModule, KeepsParametersAndThenBuffersUnderTheirNames) {
  auto net = small_net(1);
  EXPECT_THAT(names_of(stateful(net).state()),
              ElementsAre("0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias", "1.running_mean",
                          "1.running_var", "1.num_batches_tracked"));
}

TEST(StatefulModule, LoadsInPlace) {
  auto source = small_net(1);
  source->forward(torch::randn({8, 3}));  // moves the running statistics
  auto target = small_net(2);
  const auto parameters = target->parameters();
  const auto* memory = parameters[0].const_data_ptr();
  stateful(target).load(stateful(source).state());
  expect_equal(copies_of(*target), copies_of(*source));
  EXPECT_EQ(target->parameters()[0].const_data_ptr(), memory);
  EXPECT_TRUE(parameters[0].requires_grad());
  EXPECT_TRUE(parameters[0].is_leaf());
}

TEST(StatefulModule, TakesModulesHoldersAndSharedPointers) {
  torch::nn::Linear holder(2, 2);
  const std::shared_ptr<torch::nn::LinearImpl> pointer = holder.ptr();
  torch::nn::Module& module = *holder;
  for (const Stateful& one : {stateful(holder), stateful(pointer), stateful(module)}) {
    EXPECT_THAT(names_of(one.state()), ElementsAre("weight", "bias"));
  }
}

// The weight is registered twice, and once more as a buffer that shares its memory.
struct Tied : torch::nn::Module {
  Tied() {
    weight = register_parameter("weight", torch::randn({4, 3}));
    register_parameter("head", weight);
    register_buffer("alias", weight.detach());
    register_buffer("transposed", weight.detach().t());  // the same memory, but not the same values
  }
  Tensor weight;
};

TEST(StatefulModule, KeepsTiedTensorsOnce) {
  Tied source;
  Tied target;
  const StateDict state = stateful(source).state();
  EXPECT_THAT(names_of(state), ElementsAre("weight", "transposed"));
  stateful(target).load(state);
  EXPECT_TRUE(torch::equal(target.weight, source.weight));
}

TEST(StatefulModule, RefusesStateThatDoesNotFitAndChangesNothing) {
  auto net = small_net(1);
  const auto before = copies_of(*net);
  const auto loading = [&](const StateDict& state) { return [&] { stateful(net).load(state); }; };
  const auto refused = [](const std::string& what, const std::string& more) {
    return ThrowsMessage<CorruptFile>(AllOf(HasSubstr(what), HasSubstr(more)));
  };
  auto wider = small_net(2, 6);
  EXPECT_THAT(loading(stateful(wider).state()),
              refused("'0.weight' is Float [6, 3] in the state", "Float [5, 3] in the model"));

  auto other = small_net(2);
  StateDict doubled = stateful(other).state();
  doubled.set("2.bias", torch::zeros({2}, torch::kDouble));
  EXPECT_THAT(loading(doubled), refused("'2.bias'", "Double"));

  StateDict without;
  const StateDict whole = stateful(other).state();
  for (const StateDict::Entry& entry : whole.entries()) {
    if (entry.name != "1.running_var") {
      without.set(entry.name, entry.value);
    }
  }
  EXPECT_THAT(loading(without), refused("no '1.running_var'", "other options"));

  StateDict more = stateful(other).state();
  more.set("3.weight", torch::ones({2}));
  EXPECT_THAT(loading(more), refused("'3.weight'", "the model lacks"));

  StateDict number = stateful(other).state();
  number.set("0.bias", int64_t{3});
  EXPECT_THAT(loading(number), refused("'0.bias'", "type"));
  expect_equal(copies_of(*net), before);
}

// ----------------------------------------------------------------------------------- optimizers

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<Tensor>)>;

template <class Optimizer, class Options>
MakeOptimizer make(Options options) {
  return
      [options](std::vector<Tensor> parameters) { return std::make_unique<Optimizer>(std::move(parameters), options); };
}

void train(torch::nn::Sequential& net, torch::optim::Optimizer& optimizer, int64_t from, int64_t to) {
  for (int64_t step = from; step < to; ++step) {
    torch::manual_seed(100 + static_cast<uint64_t>(step));
    const Tensor x = torch::randn({8, 3});
    const auto closure = [&] {
      optimizer.zero_grad();
      Tensor loss = net->forward(x).pow(2).mean();
      loss.backward();
      return loss;
    };
    optimizer.step(closure);
  }
}

struct Case {
  const char* name;
  MakeOptimizer make;
};

class StatefulOptimizers : public ::testing::TestWithParam<Case> {};

TEST_P(StatefulOptimizers, ResumeToTheBitThroughASnapshot) {
  TemporaryFolder folder;
  auto net = small_net(1);
  auto optimizer = GetParam().make(net->parameters());
  train(net, *optimizer, 0, 4);
  SnapshotStore(folder.path()).save(4, {{"net", stateful(net)}, {"optimizer", stateful(*optimizer)}});
  train(net, *optimizer, 4, 8);

  auto resumed = small_net(2);
  auto resumed_optimizer = GetParam().make(resumed->parameters());
  train(resumed, *resumed_optimizer, 0, 1);  // state that must give way
  const auto step = SnapshotStore(folder.path())
                        .load_latest({{"net", stateful(resumed)}, {"optimizer", stateful(*resumed_optimizer)}});
  ASSERT_EQ(step, 4);
  train(resumed, *resumed_optimizer, 4, 8);
  expect_equal(copies_of(*resumed), copies_of(*net));
}

INSTANTIATE_TEST_SUITE_P(
    Torch, StatefulOptimizers,
    ::testing::Values(
        Case{"Sgd", make<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true))},
        Case{"Adam", make<torch::optim::Adam>(torch::optim::AdamOptions(0.01).amsgrad(true))},
        Case{"AdamW", make<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01))},
        Case{"RmsProp", make<torch::optim::RMSprop>(torch::optim::RMSpropOptions(0.01).centered(true).momentum(0.5))},
        Case{"Adagrad", make<torch::optim::Adagrad>(torch::optim::AdagradOptions(0.1))}),
    [](const auto& test) { return test.param.name; });

TEST(StatefulOptimizer, RestoresLearningRates) {
  auto net = small_net(1);
  torch::optim::Adam source(net->parameters(), 0.5);
  torch::optim::Adam target(net->parameters(), 0.1);
  stateful(target).load(stateful(source).state());
  EXPECT_EQ(target.param_groups()[0].options().get_lr(), 0.5);
}

TEST(StatefulOptimizer, ForgetsStateThatWasNotSaved) {
  auto net = small_net(1);
  torch::optim::Adam fresh(net->parameters(), 0.1);
  torch::optim::Adam used(net->parameters(), 0.1);
  train(net, used, 0, 1);
  ASSERT_FALSE(used.state().empty());
  stateful(used).load(stateful(fresh).state());
  EXPECT_TRUE(used.state().empty());
}

TEST(StatefulOptimizer, RefusesStateOfAnotherKindOrModelAndChangesNothing) {
  auto net = small_net(1);
  auto wider = small_net(1, 6);
  torch::optim::Adam adam(net->parameters(), 0.1);
  torch::optim::SGD sgd(net->parameters(), 0.1);
  torch::optim::Adam other(wider->parameters(), 0.1);
  train(net, adam, 0, 1);
  const auto loading = [&](const StateDict& state) { return [&] { stateful(adam).load(state); }; };
  EXPECT_THAT(loading(stateful(sgd).state()),
              ThrowsMessage<CorruptFile>(AllOf(HasSubstr("torch::optim::SGD"), HasSubstr("torch::optim::Adam"))));
  EXPECT_THAT(loading(stateful(other).state()),
              ThrowsMessage<CorruptFile>(AllOf(HasSubstr("[6,3]"), HasSubstr("[5,3]"))));
  StateDict garbage = stateful(adam).state();
  garbage.set("archive", torch::zeros({100}, torch::kByte));
  EXPECT_THAT(loading(garbage), ThrowsMessage<CorruptFile>(HasSubstr("cannot read its archive")));
  EXPECT_EQ(adam.state().size(), net->parameters().size());
}

// torch's archive cannot hold the undefined tensors that LBFGS keeps while its history grows.
TEST(StatefulOptimizer, SaysSoWhereTorchCannotSaveAnOptimizer) {
  auto net = small_net(1);
  torch::optim::LBFGS lbfgs(net->parameters(), torch::optim::LBFGSOptions(0.1).max_iter(3));
  train(net, lbfgs, 0, 2);
  EXPECT_THAT([&] { stateful(lbfgs).state(); },
              ThrowsMessage<ConfigError>(HasSubstr("cannot save the state of torch::optim::LBFGS")));
}

struct OwnOptimizer : torch::optim::SGD, StatefulOptimizer {
  using SGD::SGD;
  StateDict state_dict() const override {
    StateDict state;
    state.set("mine", int64_t{7});
    return state;
  }
  void load_state_dict(const StateDict& state) override { loaded = state.get<int64_t>("mine"); }
  int64_t loaded = 0;
};

TEST(StatefulOptimizer, UsesItsOwnStateWhereItHasOne) {
  OwnOptimizer own({torch::ones({2})}, 0.1);
  torch::optim::Optimizer& as_optimizer = own;
  EXPECT_THAT(names_of(stateful(as_optimizer).state()), ElementsAre("mine"));
  stateful(as_optimizer).load(stateful(own).state());
  EXPECT_EQ(own.loaded, 7);
}

struct Schedule {
  int64_t step = 0;
  StateDict state_dict() const {
    StateDict state;
    state.set("step", step);
    return state;
  }
  void load_state_dict(const StateDict& state) { step = state.get<int64_t>("step"); }
};

TEST(StateDict, RefusesAWholeNumberThatDoesNotFit) {
  const std::map<std::string, Tensor> no_tensors;
  EXPECT_EQ(detail::unflatten(R"({"n":9223372036854775807})", no_tensors, "file").get<int64_t>("n"),
            std::numeric_limits<int64_t>::max());
  EXPECT_THAT([&] { detail::unflatten(R"({"n":9223372036854775808})", no_tensors, "file"); },
              ThrowsMessage<CorruptFile>(HasSubstr("unknown value at 'n'")));
}

TEST(StatefulObject, IsAnythingWithAStateDict) {
  Schedule source{.step = 5};
  Schedule target;
  stateful(target).load(stateful(source).state());
  EXPECT_EQ(target.step, 5);
}

}  // namespace
}  // namespace snug::stateful_test
