// What no optimizer can work with: one clear error each, that names the parameter or option, and changes nothing.

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/core.h"
#include "snug/grad_scaler.h"
#include "snug/sgd.h"
#include "tests/support/lazy_gradient.h"
#include "tests/support/optimizers.h"
#include "tests/support/tensors.h"

namespace snug::bad_input_test {
namespace {

using ::testing::AnyOf;
using testing::clones_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::same_bits;
using ::testing::StartsWith;
using testing::tensors_in;
using torch::Tensor;

using Made = std::unique_ptr<FusedOptimizer>;

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

struct Kind {
  std::string name;
  std::function<Made(const Groups& groups, double lr)> make_of_groups;

  // The first parameter is in a group of its own, so that it would be updated before the others are looked at.
  Made make(const std::vector<Tensor>& p, double lr) const {
    return make_of_groups({{{p.front()}}, {{p.begin() + 1, p.end()}}}, lr);
  }
};

template <class Optimizer, class Options>
Kind kind(const char* name) {
  return {name, [](const Groups& groups, double lr) -> Made {
            Options options;
            options.lr = lr;
            return std::make_unique<Optimizer>(groups, options);
          }};
}

std::vector<Kind> kinds() {
  return {kind<AdamW, AdamWOptions>("AdamW"), kind<Adam, AdamOptions>("Adam"), kind<SGD, SGDOptions>("SGD"),
          kind<AdamW8bit, AdamW8bitOptions>("AdamW8bit")};
}

/// Three parameters, and an optimizer that has made a step with them.
struct Trained {
  const Kind& kind;
  std::vector<Tensor> p = testing::random_parameters();
  Made optimizer = kind.make(p, 0.1);

  explicit Trained(const Kind& k) : kind(k) {
    testing::train(*optimizer, p, 1, 1);
    testing::set_gradients(p, 2);
  }
  void step_with_gradient(const Tensor& second) {
    p[1].mutable_grad() = second;
    optimizer->step();
  }
  /// Makes another one, of this parameter after a good one.
  void make_with(const Tensor& second) const { kind.make({torch::ones({2}), second}, 0.1); }
  /// Makes a step of that one.
  void step_with(Tensor second) const {
    const Made other = kind.make({torch::ones({2}), second}, 0.1);
    second.mutable_grad() = torch::ones_like(second);
    other->step();
  }
  /// Loads the state with this in the place of what the first group has of that name.
  void load_with(const std::string& option, StateDict::Value value) {
    StateDict state = optimizer->state_dict();
    StateDict groups = state.get<StateDict>("param_groups");
    StateDict group = groups.get<StateDict>("0");
    group.set(option, std::move(value));
    groups.set("0", std::move(group));
    state.set("param_groups", std::move(groups));
    optimizer->load_state_dict(state);
  }
};

struct Case {
  std::string what;
  std::function<void(Trained&)> act;
  std::vector<std::string> says;
};

std::vector<Case> cases() {
  const double nan = std::nan("");
  return {
      {"no groups", [](Trained& t) { t.kind.make_of_groups({}, 0.1); }, {"there are no parameters"}},
      {"no parameters",
       [](Trained& t) { t.kind.make_of_groups({{std::vector<Tensor>()}}, 0.1); },
       {"there are no parameters"}},
      {"an undefined parameter", [](Trained& t) { t.make_with({}); }, {"parameter 1", "undefined"}},
      {"a parameter that is a result",
       [](Trained& t) { t.make_with(torch::ones({3}, torch::requires_grad()) * 2); },
       {"parameter 1", "[3]", "result"}},
      {"an integer parameter",
       [](Trained& t) { t.make_with(torch::ones({3}, torch::kLong)); },
       {"parameter 1", "[3]", "Long"}},
      {"an FP16 parameter",
       [](Trained& t) { t.step_with(torch::ones({3}, torch::kHalf)); },
       {"parameter 1", "[3]", "Half"}},
      {"a BF16 parameter",
       [](Trained& t) { t.step_with(torch::ones({3}, torch::kBFloat16)); },
       {"parameter 1", "[3]", "BFloat16"}},
      {"a learning rate of NaN", [nan](Trained& t) { t.kind.make(t.p, nan); }, {"lr is nan"}},
      {"a learning rate below 0", [](Trained& t) { t.kind.make(t.p, -1); }, {"lr is -1"}},
      {"a learning rate that becomes NaN",
       [nan](Trained& t) {
         t.optimizer->param_groups()[1].options().set_lr(nan);
         t.optimizer->step();
       },
       {"lr is nan"}},
      {"an FP16 gradient",
       [](Trained& t) { t.step_with_gradient(torch::ones({64}, torch::kHalf)); },
       {".step: ", "gradient of parameter 1", "Half"}},
      {"a BF16 gradient",
       [](Trained& t) { t.step_with_gradient(torch::ones({64}, torch::kBFloat16)); },
       {".step: ", "gradient of parameter 1", "BFloat16"}},
      {"an FP64 gradient",
       [](Trained& t) { t.step_with_gradient(torch::ones({64}, torch::kDouble)); },
       {".step: ", "gradient of parameter 1", "Double"}},
      {"an integer gradient",
       [](Trained& t) { t.step_with_gradient(torch::ones({64}, torch::kLong)); },
       {".step: ", "gradient of parameter 1", "Long"}},
      {"a gradient of another shape",
       [](Trained& t) { t.step_with_gradient(torch::ones({63})); },
       {".step: ", "gradient of parameter 1", "[63]", "[64]"}},
      {"a gradient of another shape of a parameter with a name",
       [](Trained& t) {
         t.optimizer->name_parameters({{"layer.weight", t.p[0]}, {"layer.bias", t.p[1]}});
         t.step_with_gradient(torch::ones({63}));
       },
       {".step: ", "parameter 'layer.bias'"}},
      {"a sparse gradient",
       [](Trained& t) { t.step_with_gradient(torch::ones({64}).to_sparse()); },
       {".step: ", "gradient of parameter 1", "sparse"}},
      {"a closure under a scaler",
       [](Trained& t) {
         t.optimizer->set_gradient_scaling(torch::ones({}), torch::zeros({}));
         t.optimizer->step([] { return torch::zeros({}); });
       },
       {".step: ", "closure", "GradScaler"}},
      {"a state of fewer parameters",
       [](Trained& t) { t.optimizer->load_state_dict(t.kind.make({t.p[0], t.p[1]}, 0.1)->state_dict()); },
       {".load_state_dict: ", "1 parameters", "2"}},
      {"a learning rate of NaN in a state", [nan](Trained& t) { t.load_with("lr", nan); }, {"lr is nan"}},
      {"a state with an option that is not offered",
       [](Trained& t) { t.load_with("maximize", true); },
       {".load_state_dict: ", "maximize"}},
  };
}

TEST(BadInput, IsOneClearErrorThatChangesNothing) {
  for (const Kind& kind : kinds()) {
    for (const Case& row : cases()) {
      SCOPED_TRACE(kind.name + ", " + row.what);
      Trained t(kind);
      const auto parameters = clones_of(t.p);
      const auto state = tensors_in(t.optimizer->state_dict());
      const std::string message = error_of<Error>([&] { row.act(t); });
      EXPECT_THAT(message, AnyOf(StartsWith(kind.name), StartsWith("Optimizer: parameter 1")));
      for (const std::string& words : row.says) {
        EXPECT_THAT(message, HasSubstr(words));
      }
      EXPECT_TRUE(same_bits(clones_of(t.p), parameters));
      t.optimizer->param_groups()[1].options().set_lr(0.1);
      EXPECT_TRUE(same_bits(tensors_in(t.optimizer->state_dict()), state));
    }
  }
}

// SGD has a state only with momentum, so it gets some here.
TEST(BadInput, AStateOfAnotherShapeIsAnErrorThatNamesTheParameter) {
  auto all = kinds();
  all[2].make_of_groups = [](const Groups& groups, double lr) -> Made {
    return std::make_unique<SGD>(groups, SGDOptions{.lr = lr, .momentum = 0.9});
  };
  for (const Kind& kind : all) {
    SCOPED_TRACE(kind.name);
    Trained t(kind);
    auto others = testing::random_parameters();
    others[1] = torch::ones({65}, torch::requires_grad());
    const Made other = kind.make(others, 0.7);
    testing::train(*other, others, 1, 1);
    const auto state = tensors_in(t.optimizer->state_dict());
    EXPECT_THAT(error_of<CorruptFile>([&] { t.optimizer->load_state_dict(other->state_dict()); }),
                ::testing::AllOf(HasSubstr(kind.name + ".load_state_dict"), HasSubstr("parameter 1"), HasSubstr("[65]"),
                                 HasSubstr("[64]")));
    t.optimizer->name_parameters({{"layer.bias", t.p[1]}});
    EXPECT_THAT(error_of<CorruptFile>([&] { t.optimizer->load_state_dict(other->state_dict()); }),
                HasSubstr("parameter 'layer.bias'"));
    EXPECT_TRUE(same_bits(tensors_in(t.optimizer->state_dict()), state));
    for (const auto& group : t.optimizer->param_groups()) {
      EXPECT_EQ(group.options().get_lr(), 0.1);
    }
  }
}

TEST(BadInput, OfOneOptimizersStateIsRefusedByTheOther) {
  const auto p = testing::random_parameters();
  AdamW decoupled(p);
  Adam coupled(p);
  testing::train(decoupled, p, 1, 1);
  testing::train(coupled, p, 1, 1);
  EXPECT_THAT(error_of<ConfigError>([&] { coupled.load_state_dict(decoupled.state_dict()); }),
              HasSubstr("Adam.load_state_dict: decoupled_weight_decay is true"));
  EXPECT_THAT(error_of<ConfigError>([&] { decoupled.load_state_dict(coupled.state_dict()); }),
              HasSubstr("AdamW.load_state_dict: decoupled_weight_decay is false"));
}

TEST(BadInput, AGradientWhoseMemoryHasTheNegativeIsUsedByItsValues) {
  const auto check = [](const char* name, const auto& make) {
    const Tensor lazy = testing::one(), plain = testing::one();
    const auto of_lazy = make(lazy), of_plain = make(plain);
    testing::set_lazy_gradient(lazy);
    ASSERT_TRUE(lazy.grad().is_neg());
    plain.mutable_grad() = lazy.grad().clone().resolve_neg();
    of_lazy->step();
    of_plain->step();
    EXPECT_TRUE(testing::same_bits(lazy.detach(), plain.detach())) << name;
  };
  using Parameters = std::vector<Tensor>;
  check("AdamW", [](const Tensor& p) { return std::make_unique<AdamW>(Parameters{p}); });
  check("Adam", [](const Tensor& p) { return std::make_unique<Adam>(Parameters{p}); });
  check("SGD", [](const Tensor& p) { return std::make_unique<SGD>(Parameters{p}, SGDOptions{.lr = 0.1}); });
  check("AdamW8bit", [](const Tensor& p) {
    return std::make_unique<AdamW8bit>(Parameters{p}, AdamW8bitOptions{.lr = 0.1, .min_elements = 1});
  });
}

TEST(BadInput, AParameterWhoseMemoryHasTheNegativeIsRefused) {
  const Tensor lazy = torch::_neg_view(torch::ones({3})).requires_grad_();
  ASSERT_TRUE(lazy.is_neg());
  EXPECT_THAT(error_of<ConfigError>([&] { AdamW({lazy}); }), HasSubstr("clone() it"));
}

}  // namespace
}  // namespace snug::bad_input_test
