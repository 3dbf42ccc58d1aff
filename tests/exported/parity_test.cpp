// Exported models train in C++ as they do in Python, to the bit.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/adamw.h"
#include "snug/exported/exported_module.h"
#include "tests/exported/as_python.h"
#include "tests/support/tensors.h"

namespace snug::exported_parity_test {
namespace {

using snug::testing::expect_known;
using snug::testing::ExportedCase;
using snug::testing::same_bits;
using snug::testing::train_as_python;
using ::testing::ElementsAre;
using ::testing::Pair;

class ExportedParity : public snug::testing::WithExportedModels, public ::testing::WithParamInterface<const char*> {};

void train_as_python(ExportedCase& test, const std::string& batches) {
  AdamW optimizer(test.model->parameters(), {.lr = 1e-2});
  train_as_python(test, batches, optimizer, [&](const auto& batch) {
    optimizer.zero_grad();
    const at::Tensor loss = test.model->forward(batch);
    loss.backward();
    optimizer.step();
    return loss;
  });
}

TEST_P(ExportedParity, LossesGradientsWeightsBuffersOptimizerAndGeneratorAreThoseOfPython) {
  ExportedCase test(GetParam());
  train_as_python(test, "same");
}

TEST_P(ExportedParity, BatchesOfOtherSizesGiveTheBitsOfPython) {
  ExportedCase test(GetParam());
  train_as_python(test, "other");
}

TEST_P(ExportedParity, EvalRunsTheOtherGraphOnTheSameWeights) {
  ExportedCase test(GetParam());
  train_as_python(test, "same");
  test.model->eval();
  const at::NoGradGuard guard;
  expect_known(test, "same.eval", test.model->forward(test.inputs(0)));
}

TEST_P(ExportedParity, AllStateThatPythonHasIsThereAndNoMore) {
  const ExportedCase test(GetParam());
  std::set<std::string> python, here;
  for (const auto& [name, tensor] : test.known) {
    if (name.starts_with("same.state.")) {
      python.insert(name.substr(11));
    }
  }
  for (const auto& [name, tensor] : test.model->state_dict()) {
    here.insert(name);
  }
  EXPECT_EQ(here, python);
}

INSTANTIATE_TEST_SUITE_P(Models, ExportedParity,
                         ::testing::Values("mlp", "conv", "lstm", "encoder", "tied", "cond", "autocast", "no_grad",
                                           "checkpoint"),
                         [](const auto& model) { return std::string(model.param); });

INSTANTIATE_TEST_SUITE_P(Zoo, ExportedParity, snug::testing::zoo(),
                         [](const auto& model) { return std::string(model.param); });

class ExportedNames : public snug::testing::WithExportedModels {};

TEST_F(ExportedNames, TiedWeightsAreOneParameterAndFrozenOnesStayFrozen) {
  const ExportedCase test("tied");
  EXPECT_THAT(test.model->aliases(), ElementsAre(Pair("head.weight", "embedding.weight")));
  std::map<std::string, bool> trains;
  for (const auto& parameter : test.model->named_parameters()) {
    trains[parameter.key()] = parameter.value().requires_grad();
  }
  EXPECT_THAT(trains, ElementsAre(Pair("embedding.weight", true), Pair("place", false)));
  EXPECT_FALSE(test.model->state_dict().contains("mask"));
}

TEST_F(ExportedNames, InputsAndOutputsHavePythonsNames) {
  const ExportedCase test("tied");
  EXPECT_THAT(test.model->input_names(), ElementsAre("x", "y"));
  EXPECT_THAT(test.model->output_names(), ElementsAre("loss", "mean"));
  EXPECT_THAT(ExportedCase("mlp").model->output_names(), ElementsAre("output"));
  const auto inputs = test.inputs(0);
  const auto outputs = test.model->run(inputs);
  ASSERT_EQ(outputs.size(), 2);
  EXPECT_TRUE(same_bits(test.model->forward_named({{"y", inputs[1]}, {"x", inputs[0]}}), outputs[0]));
}

}  // namespace
}  // namespace snug::exported_parity_test
