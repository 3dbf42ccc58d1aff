// Inputs that a program was not exported for, and operators that fail.

#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "tests/exported/exported_files.h"

namespace snug::exported_bad_inputs_test {
namespace {

using snug::testing::ExportedCase;
using ::testing::AllOf;
using ::testing::HasSubstr;

class BadExportedInputs : public snug::testing::WithExportedModels {
 protected:
  static std::string error_of(ExportedModule& model, const std::vector<at::Tensor>& inputs) {
    try {
      model.forward(inputs);
      return "";
    } catch (const ConfigError& error) {
      return std::string("ConfigError: ") + error.what();  // a Stepper that looks for a micro-batch would give up
    } catch (const UnfitInput& error) {
      return error.what();
    }
  }
};

TEST_F(BadExportedInputs, AreNamedWithDimensionAndRange) {
  ExportedCase test("mlp");
  const auto y = torch::zeros({4}, torch::kLong);
  EXPECT_EQ(error_of(*test.model, {torch::zeros({4, 6}), y}), "");
  EXPECT_EQ(error_of(*test.model, {torch::zeros({4, 7}), y}),
            "ExportedModule: input 'x' has 7 in dimension 1, where the program was exported for 6 alone; export with "
            "dynamic_shapes={\"x\": {1: torch.export.Dim.DYNAMIC}}");
  EXPECT_EQ(error_of(*test.model, {torch::zeros({65, 6}), torch::zeros({65}, torch::kLong)}),
            "ExportedModule: input 'x' has 65 in dimension 0, where the program was exported for 0 to 64");
  EXPECT_EQ(error_of(*test.model, {torch::zeros({5, 6}), y}),
            "ExportedModule: input 'y' has 4 in dimension 0, but another dimension that must be equal has 5");
  EXPECT_EQ(error_of(*test.model, {torch::zeros({4, 6}, torch::kLong), y}),
            "ExportedModule: input 'x' is Long, but was Float at export");
  EXPECT_EQ(error_of(*test.model, {torch::zeros({4, 6, 1}), y}),
            "ExportedModule: input 'x' has 3 dimensions, but had 2 at export");
  EXPECT_EQ(error_of(*test.model, {at::Tensor(), y}), "ExportedModule: input 'x' is an undefined tensor");
  EXPECT_EQ(error_of(*test.model, {y}), "ExportedModule: 1 inputs instead of 2");
}

TEST_F(BadExportedInputs, ByNameMustBeThoseOfTheProgram) {
  ExportedCase test("mlp");
  EXPECT_THROW(test.model->forward_named({{"x", torch::zeros({4, 6})}}), ConfigError);
  EXPECT_THROW(test.model->forward_named({{"x", torch::zeros({4, 6})}, {"z", torch::zeros({4}, torch::kLong)}}),
               ConfigError);
}

TEST_F(BadExportedInputs, AnOperatorThatFailsIsNamedWithItsPlaceInPython) {
  ExportedCase test("mlp");
  try {
    test.model->forward({torch::zeros({4, 6}), torch::full({4}, 3, torch::kLong)});
    FAIL();
  } catch (const c10::Error& error) {
    EXPECT_THAT(error.what(),
                AllOf(HasSubstr("Target 3 is out of bounds"),
                      HasSubstr("[in torch.ops.aten.cross_entropy_loss.default, from File"), HasSubstr("models.py")));
  }
}

TEST_F(BadExportedInputs, MemoryThatRunsOutIsNoOtherError) {
  ExportedCase test("encoder");
  const auto inputs = test.inputs(0);
  const MemoryLimit limit(torch::kCPU, Bytes(live_bytes(torch::kCPU).count() + 4096));
  EXPECT_THROW(test.model->forward(inputs), c10::OutOfMemoryError);
}

}  // namespace
}  // namespace snug::exported_bad_inputs_test
