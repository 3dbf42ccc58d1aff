// The simulated accelerator itself: is it one, and does it compute what the CPU computes?

#include "tests/support/sim_device/sim_device.h"

#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tests/support/move_to.h"
#include "tests/support/tensors.h"

namespace snug::sim_device_test {
namespace {

using sim_device::device;
using testing::move_to;
using testing::same_bits;
using torch::Tensor;
namespace nn = torch::nn;

constexpr size_t kAll = 0;

Tensor on_cpu(const Tensor& tensor) { return tensor.detach().to(torch::kCPU); }

std::vector<Tensor> on_cpu(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> moved;
  for (const Tensor& tensor : tensors) {
    moved.push_back(on_cpu(tensor));
  }
  return moved;
}

// One of each kind of layer that models in use have.
struct NetworkImpl : nn::Module {
  nn::Embedding embedding{nn::EmbeddingOptions(11, 8)};
  nn::Conv1d convolution{nn::Conv1dOptions(8, 8, 3).padding(1)};
  nn::BatchNorm1d batch_norm{8};
  nn::LayerNorm layer_norm{nn::LayerNormOptions({8})};
  nn::Linear query{8, 8}, key{8, 8}, value{8, 8}, head{8, 11};

  NetworkImpl() {
    register_module("embedding", embedding);
    register_module("convolution", convolution);
    register_module("batch_norm", batch_norm);
    register_module("layer_norm", layer_norm);
    register_module("query", query);
    register_module("key", key);
    register_module("value", value);
    register_module("head", head);
  }

  Tensor loss(const Tensor& tokens, const Tensor& targets) {
    Tensor x = embedding(tokens).transpose(1, 2);
    x = batch_norm(torch::gelu(convolution(x))).transpose(1, 2);
    x = layer_norm(x);
    const Tensor scores = query(x).matmul(key(x).transpose(1, 2)) / 3.0;
    x = x + torch::softmax(scores, -1).matmul(value(x));
    x = std::get<0>(torch::native_dropout(x, 0.25, is_training()));
    return nn::functional::cross_entropy(head(x).flatten(0, 1), targets.flatten());
  }
};
TORCH_MODULE(Network);

struct Trained {
  std::vector<Tensor> losses, parameters, buffers, gradients;
};

Trained train(c10::Device on) {
  torch::manual_seed(7);
  Network network;
  const Tensor tokens = torch::randint(11, {4, 6});
  const Tensor targets = torch::randint(11, {4, 6});
  move_to(*network, on);
  torch::manual_seed(8);
  torch::optim::AdamW optimizer(network->parameters(), torch::optim::AdamWOptions(1e-2));
  Trained result;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    const Tensor loss = network->loss(tokens.to(on), targets.to(on));
    loss.backward();
    optimizer.step();
    result.losses.push_back(on_cpu(loss));
  }
  result.parameters = on_cpu(network->parameters());
  result.buffers = on_cpu(network->buffers());
  for (const Tensor& parameter : network->parameters()) {
    result.gradients.push_back(on_cpu(parameter.grad()));
  }
  return result;
}

TEST(SimDevice, IsTheProcesssAccelerator) {
  EXPECT_EQ(at::getAccelerator(), c10::DeviceType::PrivateUse1);
  EXPECT_EQ(torch::ones({2}, device(1)).device().str(), "sim:1");
}

TEST(SimDevice, TrainsWithTheBitsOfTheCpu) {
  const Trained cpu = train(torch::kCPU), sim = train(device());
  EXPECT_TRUE(same_bits(cpu.losses, sim.losses));
  EXPECT_TRUE(same_bits(cpu.gradients, sim.gradients));
  EXPECT_TRUE(same_bits(cpu.parameters, sim.parameters));
  EXPECT_TRUE(same_bits(cpu.buffers, sim.buffers));
}

TEST(SimDevice, TrainsWithTheSameBitsOnLazyStreams) {
  const Trained cpu = train(torch::kCPU);
  const sim_device::LazyStreams lazy;
  const Trained sim = train(device());
  EXPECT_TRUE(same_bits(cpu.losses, sim.losses));
  EXPECT_TRUE(same_bits(cpu.gradients, sim.gradients));
  EXPECT_TRUE(same_bits(cpu.parameters, sim.parameters));
  EXPECT_TRUE(same_bits(cpu.buffers, sim.buffers));
}

TEST(SimDevice, GoesBackwardOnAThreadOfTheDevice) {
  const auto thread_of_backward = [] {
    std::thread::id ran_on;
    const Tensor x = torch::ones({2}, torch::requires_grad().device(device()));
    const Tensor y = x * 2;
    y.register_hook([&](const Tensor&) { ran_on = std::this_thread::get_id(); });
    y.sum().backward();
    return ran_on;
  };
  EXPECT_NE(thread_of_backward(), std::this_thread::get_id());
  auto& state = c10::AutogradState::get_tls_state();
  state.set_multithreading_enabled(false);
  EXPECT_EQ(thread_of_backward(), std::this_thread::get_id());
  state.set_multithreading_enabled(true);
}

TEST(SimDevice, CountsBytesInBlocksOf512) {
  const auto before = sim_device::stats(), of_other = sim_device::stats(device(1));
  Tensor x = torch::empty({1000}, torch::dtype(torch::kUInt8).device(device()));
  const auto with = sim_device::stats();
  EXPECT_EQ(with.allocated_bytes[kAll].current, before.allocated_bytes[kAll].current + 1024);
  EXPECT_EQ(with.requested_bytes[kAll].current, before.requested_bytes[kAll].current + 1000);
  x.reset();
  const auto after = sim_device::stats();
  EXPECT_EQ(after.allocated_bytes[kAll].current, before.allocated_bytes[kAll].current);
  EXPECT_EQ(after.reserved_bytes[kAll].current, with.reserved_bytes[kAll].current);
  EXPECT_EQ(sim_device::stats(device(1)).allocation[kAll].allocated, of_other.allocation[kAll].allocated);
}

TEST(SimDevice, GivesFreedMemoryAwayAtOnceAndOverwritesIt) {
  Tensor x = torch::zeros({7, 1000}, device());
  const void* const place = x.data_ptr();
  x.reset();
  const Tensor y = torch::empty({7, 1000}, device());
  EXPECT_EQ(y.data_ptr(), place);
  EXPECT_TRUE(y.isnan().all().item<bool>());
}

TEST(SimDevice, KeepsItsLimitAndFailsOnDemand) {
  const auto allocate = [] { return torch::empty({1 << 20}, torch::dtype(torch::kUInt8).device(device())); };
  c10::getDeviceAllocator(c10::DeviceType::PrivateUse1)->emptyCache();
  const int64_t before = sim_device::set_limit(sim_device::stats().reserved_bytes[kAll].current + (1 << 20));
  Tensor first = allocate();
  EXPECT_THROW(allocate(), c10::OutOfMemoryError);
  first.reset();
  EXPECT_NO_THROW(allocate());
  sim_device::set_limit(before);

  const sim_device::FailingAllocation failing(2);
  EXPECT_NO_THROW(allocate());
  EXPECT_FALSE(failing.has_failed());
  EXPECT_THROW(allocate(), c10::OutOfMemoryError);
  EXPECT_TRUE(failing.has_failed());
  EXPECT_NO_THROW(allocate());
}

TEST(SimDevice, CountsWhatTheHostReads) {
  const Tensor x = torch::ones({3}, device());
  const int64_t before = sim_device::host_reads();
  const Tensor y = (x * 2).sum();
  EXPECT_EQ(sim_device::host_reads(), before);
  EXPECT_EQ(y.item<float>(), 6);
  EXPECT_EQ(sim_device::host_reads(), before + 1);
  on_cpu(x);
  EXPECT_EQ(sim_device::host_reads(), before + 2);
  x.nonzero();
  EXPECT_EQ(sim_device::host_reads(), before + 3);
}

}  // namespace
}  // namespace snug::sim_device_test
