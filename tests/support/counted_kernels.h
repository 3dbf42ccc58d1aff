#pragma once
// CountedKernels: how often kernels of the CPU run while the object lives, whoever calls the kernels: the program,
// autograd, or a region whose operators run again. Policies and profilers do not see operators that run again.
//
//   CountedKernels runs({"aten::mm", "aten::add_.Tensor"});
//   loss.backward();
//   EXPECT_EQ(runs.of("aten::mm"), 2);

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace snug::testing {

class CountedKernels {
 public:
  /// `names` are names with overloads. LibTorch warns that the kernels are replaced.
  explicit CountedKernels(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      const auto dot = name.find('.');
      const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(
          name.substr(0, dot).c_str(), dot == std::string::npos ? "" : name.c_str() + dot + 1);
      auto kernel = std::make_unique<Kernel>(op.getComputedKernelForDispatchKey(c10::DispatchKey::CPU));
      std::atomic<int>& runs = kernel->runs;
      library_.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
      runs_.emplace(name, &runs);
    }
  }

  int of(const std::string& name) const { return *runs_.at(name); }

 private:
  struct Kernel final : c10::OperatorKernel {
    explicit Kernel(c10::SafeKernelFunction replaces) : replaced(std::move(replaces)) {}
    void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
      ++runs;
      replaced.callBoxed(op, keys, stack);
    }
    c10::SafeKernelFunction replaced;
    std::atomic<int> runs = 0;
  };

  torch::Library library_{torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__};
  std::map<std::string, const std::atomic<int>*> runs_;
};

}  // namespace snug::testing
