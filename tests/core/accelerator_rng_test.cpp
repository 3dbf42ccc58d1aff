// RngState on an accelerator that is not CUDA. A program of its own, since an accelerator that is registered stays.

#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/state.h"

namespace snug::accelerator_rng_test {
namespace {

c10::Device device(int index) { return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)}; }

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::Device of) : CPUGeneratorImpl(1) {
    device_ = of;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_);
    copy->set_state(*get_state());
    return copy;
  }
};

// Two devices, of which the second is in use.
struct Hooks final : at::PrivateUse1HooksInterface {
  std::vector<at::Generator> generators{at::make_generator<Generator>(device(0)),
                                        at::make_generator<Generator>(device(1))};

  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 2; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return index == 1; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return generators.at(static_cast<size_t>(index));
  }
};

Hooks* accelerator() {
  static Hooks* const hooks = [] {
    c10::register_privateuse1_backend("sim");
    auto* made = new Hooks;
    at::RegisterPrivateUse1HooksInterface(made);
    return made;
  }();
  return hooks;
}

uint64_t draw(size_t index) { return accelerator()->generators.at(index).get<Generator>()->random(); }

TEST(RngStateOfAnAccelerator, GivesTheSameNumbersAgainOnDevicesThatAreInUse) {
  draw(1);
  const auto state = RngState::capture();
  const uint64_t unused = draw(0), first = draw(1), second = draw(1);
  EXPECT_FALSE(state.is_current());
  state.restore();
  EXPECT_TRUE(state.is_current());
  EXPECT_EQ(draw(1), first);
  EXPECT_EQ(draw(1), second);
  EXPECT_NE(draw(0), unused);
}

TEST(RngStateOfAnAccelerator, GoesThroughAStateDict) {
  draw(1);
  const StateDict saved = RngState::capture().state_dict();
  EXPECT_TRUE(saved.contains("cpu"));
  EXPECT_TRUE(saved.contains("sim:1"));
  EXPECT_FALSE(saved.contains("sim:0"));
  const uint64_t next = draw(1);
  RngState::from_state_dict(saved).restore();
  EXPECT_EQ(draw(1), next);
}

}  // namespace
}  // namespace snug::accelerator_rng_test
