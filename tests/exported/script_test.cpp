// TorchScript modules as modules that train.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/torch.h>

#include "snug/core/error.h"
#include "snug/core/out_of_memory.h"
#include "snug/exported/script_module.h"
#include "snug/memory/limit.h"
#include "snug/memory/meter.h"
#include "snug/optim/adamw.h"
#include "snug/step/stepper.h"
#include "tests/support/tensors.h"

namespace snug::script_test {
namespace {

using snug::testing::same_bits;

constexpr int64_t kWidth = 64;

// Layers with a tied weight, a buffer that counts, and dropout while it trains.
torch::jit::Module some_script(const char* count = "self.count += 1") {
  torch::manual_seed(1);
  torch::jit::Module inner("Inner"), script("Script");
  inner.register_attribute("training", c10::BoolType::get(), true);
  inner.register_parameter("weight", (torch::randn({kWidth, kWidth}) / 8).requires_grad_(), false);
  script.register_attribute("training", c10::BoolType::get(), true);
  script.register_module("inner", inner);
  script.register_parameter("tied", inner.attr("weight").toTensor(), false);
  script.register_parameter("scale", torch::ones({kWidth}).requires_grad_(), false);
  script.register_buffer("count", torch::zeros({}, torch::kLong));
  script.define(std::string(R"(
    def forward(self, x):
        if self.training:
            )") +
                count + R"(
        for i in range(6):
            x = torch.dropout(torch.gelu(x @ self.inner.weight), 0.1, self.training) * self.scale
        return ((x @ self.tied) ** 2).mean()
  )");
  return script;
}

// Losses, weights and buffers of three steps.
std::vector<at::Tensor> trained(Bytes budget, int64_t* peak = nullptr) {
  const auto model = wrap_script(some_script());
  torch::manual_seed(2);
  const Batch batch{torch::randn({256, kWidth})};
  AdamW optimizer(model->parameters());
  Stepper stepper(model, optimizer, {.micro_batch = 256, .memory_budget = budget});
  std::vector<at::Tensor> result;
  for (int step = 0; step < 3; ++step) {
    MemoryMeter meter(torch::kCPU);
    const auto made = stepper.step(
        batch, [&](const Batch& micro) { return Loss::mean(model->forward(micro.tensors()), micro.size()); });
    result.push_back(torch::tensor(made.loss()));
    if (peak != nullptr) {
      *peak = meter.report().peak_bytes;
    }
  }
  for (const auto& [name, tensor] : model->state_dict()) {
    result.push_back(tensor);
  }
  return result;
}

TEST(ScriptModule, HasParametersAndBuffersUnderTheirNamesTiedOnesOnce) {
  const auto model = wrap_script(some_script());
  std::vector<std::string> names;
  for (const auto& parameter : model->named_parameters()) {
    names.push_back(parameter.key());
  }
  EXPECT_THAT(names, ::testing::UnorderedElementsAre(::testing::AnyOf("inner.weight", "tied"), "scale"));
  EXPECT_EQ(model->named_buffers().size(), 1);
  EXPECT_EQ(model->state_dict().size(), 3);
}

TEST(ScriptModule, TrainsWithTheBitsOfTheScriptItself) {
  const auto model = wrap_script(some_script());
  torch::jit::Module script = some_script();
  const at::Tensor x = torch::randn({8, kWidth});
  for (int call = 0; call < 3; ++call) {
    torch::manual_seed(3);
    model->forward({x}).backward();
    torch::manual_seed(3);
    script.forward({x}).toTensor().backward();
  }
  const auto parameters = model->named_parameters();
  for (const auto& parameter : script.named_parameters()) {
    if (const auto* own = parameters.find(parameter.name)) {
      EXPECT_TRUE(same_bits(own->grad(), parameter.value.grad())) << parameter.name;
    }
  }
  EXPECT_EQ(model->state_dict().at("count").item<int64_t>(), 3);
  model->eval();
  EXPECT_TRUE(same_bits(model->forward({x}), model->forward({x})));
  EXPECT_EQ(model->state_dict().at("count").item<int64_t>(), 3);
}

TEST(ScriptModule, CastsFloatsAlone) {
  const auto model = wrap_script(some_script());
  model->to(torch::kDouble);
  EXPECT_EQ(model->state_dict().at("scale").scalar_type(), torch::kDouble);
  EXPECT_EQ(model->state_dict().at("count").scalar_type(), torch::kLong);
  EXPECT_EQ(model->forward({torch::randn({8, kWidth}, torch::kDouble)}).scalar_type(), torch::kDouble);
}

TEST(ScriptModule, UnderHalfTheMemoryHasTheBitsOfPlainTraining) {
  int64_t plain_peak = 0, planned_peak = 0;
  const auto plain = trained(Bytes::unlimited(), &plain_peak);
  const auto planned = trained(Bytes(plain_peak / 2), &planned_peak);
  EXPECT_LE(planned_peak, plain_peak / 2);
  ASSERT_EQ(plain.size(), planned.size());
  for (size_t i = 0; i < plain.size(); ++i) {
    EXPECT_TRUE(same_bits(plain[i], planned[i])) << i;
  }
}

TEST(ScriptModule, ThatRunsOutOfMemoryIsRecognised) {
  const auto model = wrap_script(some_script());
  const at::Tensor x = torch::randn({256, kWidth});
  const MemoryLimit limit(torch::kCPU, Bytes(live_bytes(torch::kCPU).count() + 100'000));
  try {
    model->forward({x});
    FAIL() << "nothing was thrown";
  } catch (const std::exception& error) {
    EXPECT_TRUE(is_out_of_memory(error)) << error.what();
  }
}

TEST(ScriptModule, RefusesABufferThatBecameAnotherTensor) {
  const auto model = wrap_script(some_script("self.count = self.count + 1"));
  EXPECT_THAT([&] { model->forward({torch::randn({8, kWidth})}); },
              ::testing::ThrowsMessage<Error>(::testing::HasSubstr("'count'")));
}

}  // namespace
}  // namespace snug::script_test
