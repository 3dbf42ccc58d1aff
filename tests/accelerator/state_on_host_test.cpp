// Optimizers of parameters on an accelerator whose state is on the host or in a file: the bits are the CPU's.

#include <optional>
#include <stdexcept>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "snug/core.h"
#include "snug/memory.h"
#include "snug/muon.h"
#include "tests/accelerator/accelerator.h"
#include "tests/support/failing_allocations.h"
#include "tests/support/optimizer_kinds.h"
#include "tests/support/optimizers.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/tensors.h"

namespace snug::state_on_host_test {
namespace {

using testing::accelerator;
using ::testing::AllOf;
using testing::error_of;
using testing::FailingAllocation;
using testing::for_each_failing_allocation;
using ::testing::HasSubstr;
using testing::Kind;
using testing::kinds;
using testing::same_bits;
using testing::set_gradients;
using testing::tensors_in;
using testing::Training;
using torch::Tensor;

const Bytes kSmallWindow(192 << 10);  // in which parameters of 100,000 elements are cut
const StateOnHost kOnHost{.window = kSmallWindow};

bool is_on_host(const FusedOptimizer& optimizer) {
  return std::holds_alternative<StateOnHost>(optimizer.state_placement());
}

class StateOnHostOfAccelerator : public ::testing::TestWithParam<Kind> {
 protected:
  StateFile file() const { return {.directory = folder.path(), .window = kSmallWindow}; }
  // Sweeps take long. One optimizer of each form of state is swept.
  static bool is_swept() {
    const std::string name = GetParam().name;
    return name == "AdamW" || name == "AdamWWithMasters" || name == "AdamW8bitInBf16";
  }
  testing::TemporaryFolder folder;
};
INSTANTIATE_TEST_SUITE_P(Of, StateOnHostOfAccelerator, ::testing::ValuesIn(kinds()),
                         [](const auto& param_info) { return param_info.param.name; });

// Streams that run late show a missing wait, and a copy to memory that another copy still reads.
TEST_P(StateOnHostOfAccelerator, HasTheBitsOfTheCpu) {
  std::optional<sim_device::LazyStreams> lazy;
  if (sim_device::is_present()) {
    lazy.emplace();
  }
  Training cpu(GetParam());
  std::vector<Training> there;
  there.emplace_back(GetParam(), kOnHost, accelerator());
  there.emplace_back(GetParam(), StateOnHost{.window = Bytes(64 << 20)}, accelerator());
  there.emplace_back(GetParam(), file(), accelerator());
  for (uint64_t step = 1; step <= 5; ++step) {
    const auto make = [&](Training& training) {
      set_gradients(training.parameters, step);
      training.parameters[step % training.parameters.size()].mutable_grad().reset();  // some steps are without
      training.optimizer->step();
      for (const Tensor& parameter : training.parameters) {
        parameter.mutable_grad().reset();  // freed while copies may be waiting to read it
      }
    };
    make(cpu);
    for (Training& training : there) {
      make(training);
      ASSERT_TRUE(same_bits(training.all(), cpu.all())) << "step " << step;
    }
  }
  EXPECT_TRUE(is_on_host(*there[0].optimizer));
  for (const Tensor& tensor : there[0].optimizer->state_tensors()) {
    EXPECT_TRUE(tensor.is_cpu());
  }
}

TEST_P(StateOnHostOfAccelerator, HasTheBitsOfTheCpuUnderAScalerThatSkips) {
  if (GetParam().dtype == torch::kHalf) {
    GTEST_SKIP() << "a GradScaler does not unscale FP16";
  }
  Training cpu(GetParam()), there(GetParam(), kOnHost, accelerator()), in_file(GetParam(), file(), accelerator());
  for (Training* training : {&cpu, &there, &in_file}) {
    training->scaled_steps();
  }
  for (Training* training : {&there, &in_file}) {
    EXPECT_TRUE(same_bits(training->all(), cpu.all()));
    for (size_t i = 0; i < cpu.parameters.size(); ++i) {
      EXPECT_TRUE(same_bits(training->parameters[i].grad().cpu(), cpu.parameters[i].grad())) << "unscaled in place";
    }
  }
}

TEST_P(StateOnHostOfAccelerator, MovesBetweenAllPlaces) {
  Training cpu(GetParam()), there(GetParam(), kOnHost, accelerator());
  cpu.steps(1, 4);
  there.steps(1, 2);
  there.optimizer->keep_state_in(file());
  there.steps(3, 3);
  there.optimizer->keep_state_in(StateOnHost{.window = Bytes(1 << 20)});  // with other pieces
  there.steps(4, 4);
  const auto expected = cpu.all();
  ASSERT_TRUE(same_bits(there.all(), expected));
  if (!there.optimizer->may_stay_on_device()) {
    EXPECT_FALSE(there.optimizer->keep_state_in(StateOnDevice()));
    EXPECT_TRUE(is_on_host(*there.optimizer));
    return;
  }
  for (const StatePlacement& place : {StatePlacement(kOnHost), StatePlacement(file())}) {
    there.optimizer->keep_state_in(StateOnDevice());
    EXPECT_EQ(there.optimizer->state_placement(), StatePlacement(StateOnDevice()));
    for (const Tensor& tensor : there.optimizer->state_tensors()) {
      EXPECT_EQ(tensor.device().type(), accelerator().type());
    }
    ASSERT_TRUE(same_bits(there.all(), expected));
    there.optimizer->keep_state_in(place);
    ASSERT_TRUE(same_bits(there.all(), expected));
  }
  there.optimizer->keep_state_in(StateOnDevice());
  there.steps(5, 5);  // with the device's kernels
}

TEST_P(StateOnHostOfAccelerator, IsSavedAndLoaded) {
  Training cpu(GetParam()), there(GetParam(), kOnHost, accelerator()), back(GetParam());
  const auto hand_over = [](const Training& from, Training& to) {
    for (size_t i = 0; i < from.parameters.size(); ++i) {
      to.parameters[i].detach().copy_(from.parameters[i].detach());
    }
    to.optimizer->load_state_dict(from.optimizer->state_dict());
    EXPECT_TRUE(same_bits(to.all(), from.all()));
  };
  cpu.steps(1, 2);
  hand_over(cpu, there);
  there.steps(3, 4);
  hand_over(there, back);
  back.steps(5, 5);
  cpu.steps(3, 5);
  EXPECT_TRUE(is_on_host(*there.optimizer));
  EXPECT_TRUE(same_bits(back.all(), cpu.all()));
}

// --- memory

TEST_P(StateOnHostOfAccelerator, TakesNoMemoryOfTheDevice) {
  Training there(GetParam(), kOnHost, accelerator());
  EXPECT_EQ(there.optimizer->state_bytes_to_come(), 0);
  EXPECT_EQ(there.optimizer->bytes_with_state_in(kOnHost).workspace, 0);
  for (const Tensor& parameter : there.parameters) {
    parameter.mutable_grad() = torch::ones_like(parameter);  // in its layout, so that no copy is made
  }
  const MemoryMeter meter(accelerator());
  there.optimizer->step();
  there.optimizer->step();
  EXPECT_EQ(meter.report().peak_bytes, 0);
}

TEST_P(StateOnHostOfAccelerator, LeavesOnTheDeviceTheBytesThatItSays) {
  Training there(GetParam(), accelerator());
  if (!there.optimizer->may_stay_on_device()) {
    GTEST_SKIP() << "its state cannot be there";
  }
  const int64_t to_come = there.optimizer->state_bytes_to_come();
  EXPECT_EQ(there.optimizer->bytes_with_state_in(kOnHost).moved, to_come);
  there.steps(1, 1);
  const int64_t before = live_bytes(accelerator()).count();
  there.optimizer->keep_state_in(kOnHost);
  EXPECT_EQ(before - live_bytes(accelerator()).count(), to_come);
  EXPECT_EQ(there.optimizer->bytes_with_state_in(kOnHost).moved, to_come);
}

// Of the host's memory, and of its page-locked memory.
TEST_P(StateOnHostOfAccelerator, IsUnchangedByAStepThatRunsOutOfMemory) {
  Training expected(GetParam());
  expected.steps(1, 1);
  for (const bool is_file : {false, true}) {
    const StatePlacement place = is_file ? StatePlacement(file()) : StatePlacement(kOnHost);
    Training begun(GetParam(), place, accelerator());
    const auto sweep = [&](FailingAllocation& allocation) {
      Training there(GetParam(), place, accelerator());
      set_gradients(there.parameters, 1);
      if (allocation.stops<std::exception>([&] { there.optimizer->step(); })) {
        ASSERT_TRUE(same_bits(there.all(), begun.all()));
        there.optimizer->step();
      }
      ASSERT_TRUE(same_bits(there.all(), expected.all()));
    };
    if (is_swept()) {
      for_each_failing_allocation({.is_thinned = true}, sweep);
    }
    if (sim_device::is_present()) {
      Training there(GetParam(), place, accelerator());
      set_gradients(there.parameters, 1);
      sim_device::fail_pinned_after(1);
      EXPECT_THAT(error_of<Error>([&] { there.optimizer->step(); }),
                  AllOf(HasSubstr("the host has too little memory"), HasSubstr("window")));
      EXPECT_EQ(sim_device::fail_pinned_after(0), 0);
      EXPECT_TRUE(same_bits(there.all(), begun.all()));
      there.optimizer->step();
      EXPECT_TRUE(same_bits(there.all(), expected.all()));
    }
  }
}

TEST_P(StateOnHostOfAccelerator, IsUnchangedByAMoveThatRunsOutOfMemory) {
  for (const bool goes_back : {false, true}) {  // which takes memory of the device
    const bool can_fail = sim_device::is_present() || !goes_back;
    const Training begun(GetParam(), kOnHost, accelerator());
    if (!can_fail || !is_swept() || (goes_back && !begun.optimizer->may_stay_on_device())) {
      continue;
    }
    const c10::DeviceType type = goes_back ? accelerator().type() : torch::kCPU;
    for_each_failing_allocation({.is_thinned = true, .device = type}, [&](FailingAllocation& allocation) {
      Training there(GetParam(), kOnHost, accelerator());
      there.steps(1, 1);
      const auto before = there.all();
      const StatePlacement to = goes_back ? StatePlacement(StateOnDevice()) : StateOnHost{.window = Bytes(1 << 20)};
      const auto move = [&] { there.optimizer->keep_state_in(to); };
      const bool failed = goes_back ? allocation.stops(move) : allocation.stops<Error>(move);
      ASSERT_EQ(there.optimizer->state_placement(), failed ? StatePlacement(kOnHost) : to);
      ASSERT_TRUE(same_bits(there.all(), before));
    });
  }
}

TEST_P(StateOnHostOfAccelerator, IsUnchangedByAHookThatThrows) {
  Training expected(GetParam()), begun(GetParam(), kOnHost, accelerator()), there(GetParam(), kOnHost, accelerator());
  expected.steps(1, 1);
  set_gradients(there.parameters, 1);
  there.optimizer->before_writing([] { throw std::runtime_error("not now"); });
  EXPECT_THROW(there.optimizer->step(), std::runtime_error);
  EXPECT_TRUE(same_bits(there.all(), begun.all()));
  there.optimizer->step();
  EXPECT_TRUE(same_bits(there.all(), expected.all()));
}

// --- single cases

TEST(StateOnHostOfAcceleratorOfAdamW, BumpsVersionsAndReadsTheScaleOnce) {
  Training there(kinds().front(), kOnHost, accelerator());
  set_gradients(there.parameters, 1);
  const auto before = there.parameters[0]._version();
  const int64_t reads = sim_device::host_reads();
  there.optimizer->set_gradient_scaling(torch::ones({}, accelerator()), torch::zeros({}, accelerator()));
  there.optimizer->step();
  EXPECT_GT(there.parameters[0]._version(), before);
  if (sim_device::is_present()) {
    EXPECT_EQ(sim_device::host_reads() - reads, 2);
  }
}

TEST(StateOnHostOfAcceleratorOfAdamW, IsOnTheDeviceForParametersOnTheCpu) {
  Training cpu(kinds().front());
  EXPECT_TRUE(cpu.optimizer->keep_state_in(kOnHost));
  EXPECT_EQ(cpu.optimizer->state_placement(), StatePlacement(StateOnDevice()));
  EXPECT_EQ(cpu.optimizer->bytes_with_state_in(kOnHost), MovableState::PlacementBytes());
}

TEST(StateOnHostOfAcceleratorOfAdamW, TakesParametersOnSeveralDevices) {
  if (sim_device::is_present()) {
    const sim_device::LazyStreams lazy;
    const Kind kind = kinds().front();
    Training cpu(kind), mixed(kind);
    for (size_t i = 0; i < mixed.parameters.size(); ++i) {
      if (i % 3 != 0) {
        mixed.parameters[i] =
            mixed.parameters[i].detach().to(sim_device::device(static_cast<int>(i % 3) - 1)).requires_grad_();
      }
    }
    mixed.optimizer = kind.make(mixed.parameters);
    mixed.optimizer->keep_state_in(kOnHost);
    cpu.steps(1, 3);
    mixed.steps(1, 3);
    EXPECT_TRUE(same_bits(mixed.all(), cpu.all()));
  }
}

// Blocks of one parameter each. The first block, the CPU's and the last block have the same memory, and the CPU's block
// has no copies.
TEST(StateOnHostOfAcceleratorOfAdamW, WaitsForTheMemoryAcrossABlockOfTheCpu) {
  if (sim_device::is_present()) {
    const sim_device::LazyStreams lazy;
    const std::vector<std::vector<c10::Device>> places = {
        {sim_device::device(0)},
        {sim_device::device(1), sim_device::device(1)},
        {torch::kCPU, sim_device::device(1), sim_device::device(1), sim_device::device(1)}};
    const auto train = [&](bool is_on_cpu) {
      torch::manual_seed(3);
      std::vector<Tensor> parameters;
      std::vector<torch::optim::OptimizerParamGroup> groups;
      for (const auto& devices : places) {
        std::vector<Tensor> group;
        for (const c10::Device device : devices) {
          group.push_back(torch::randn({8000}).to(is_on_cpu ? torch::kCPU : device).requires_grad_());
        }
        parameters.insert(parameters.end(), group.begin(), group.end());
        groups.emplace_back(group);
      }
      AdamW optimizer(groups, {.lr = 0.01});
      optimizer.keep_state_in(kOnHost);
      testing::train(optimizer, parameters, 1, 3);
      std::vector<Tensor> result;
      for (const Tensor& parameter : parameters) {
        result.push_back(parameter.detach().cpu());
      }
      return result;
    };
    EXPECT_TRUE(same_bits(train(/*is_on_cpu=*/false), train(/*is_on_cpu=*/true)));
  }
}

TEST(StateOnHostOfAcceleratorOfSGD, GetsABufferWhenMomentumComesLater) {
  const Kind sgd = testing::kind<SGD>("SGD", SGDOptions{.lr = 0.01});
  const auto begin = [](Training& training) {
    training.steps(1, 2);
    static_cast<torch::optim::SGDOptions&>(training.optimizer->param_groups()[0].options()).momentum(0.9);
  };
  Training cpu(sgd);
  begin(cpu);
  cpu.steps(3, 4);
  for_each_failing_allocation({.is_thinned = true}, [&](FailingAllocation& allocation) {
    Training there(sgd, kOnHost, accelerator());
    begin(there);
    set_gradients(there.parameters, 3);
    const bool failed = allocation.stops<std::exception>([&] { there.optimizer->step(); });
    there.steps(failed ? 3 : 4, 4);
    ASSERT_TRUE(same_bits(there.all(), cpu.all()));
  });
}

TEST(StateOnHostOfAcceleratorOfAdamW8bit, IsNamedWhereTheStateIsOnTheDevice) {
  const Tensor parameter = testing::leaf({5000});
  parameter.mutable_grad() = torch::ones_like(parameter);
  AdamW8bit optimizer({parameter});
  EXPECT_THAT(error_of<ConfigError>([&] { optimizer.step(); }),
              AllOf(HasSubstr("keep_state_in(StateOnHost{})"), HasSubstr("`offload`")));
  EXPECT_TRUE(optimizer.keep_state_in(StateOnHost{}));
  EXPECT_NO_THROW(optimizer.step());
}

TEST(StateOnHostOfAcceleratorOfMuon, IsRefused) {
  Muon optimizer({testing::leaf({8, 8})});
  EXPECT_FALSE(optimizer.keep_state_in(kOnHost));
  EXPECT_EQ(optimizer.state_placement(), StatePlacement(StateOnDevice()));
}

}  // namespace
}  // namespace snug::state_on_host_test
