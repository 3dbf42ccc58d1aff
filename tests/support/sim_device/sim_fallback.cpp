#include "tests/support/sim_device/sim_fallback.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/native/TensorFactories.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include "tests/support/sim_device/sim_allocator.h"
#include "tests/support/sim_device/sim_device.h"
#include "tests/support/sim_device/sim_generator.h"
#include "tests/support/sim_device/sim_stream.h"

namespace snug::sim_device {
namespace {

using c10::IValue;
using torch::jit::Stack;

std::atomic<int64_t> reads = 0;

bool is_on_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// Calls a function for each tensor in a value and puts what it returns in its place.
template <typename Change>
IValue with_tensors(const IValue& value, const Change& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> changed;
    for (const at::Tensor& one : value.toTensorVector()) {
      changed.push_back(change(one));
    }
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector()) {
      changed.push_back(one ? std::optional(change(*one)) : std::nullopt);
    }
    return changed;
  }
  return value;
}

std::vector<at::Tensor> tensors_of(const Stack& stack) {
  std::vector<at::Tensor> found;
  for (const IValue& value : stack) {
    with_tensors(value, [&](const at::Tensor& tensor) {
      found.push_back(tensor);
      return tensor;
    });
  }
  return found;
}

at::Tensor cpu_tensor(c10::Storage storage, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<at::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                        like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return tensor;
}

// Of the same sizes and strides, all zeros.
at::Tensor zeros_for(const at::Tensor& like) {
  const size_t bytes = like.storage().nbytes();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::GetAllocator(c10::DeviceType::CPU)->allocate(bytes),
                       c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true);
  if (bytes > 0) {
    std::memset(storage.mutable_data(), 0, bytes);
  }
  return cpu_tensor(std::move(storage), like);
}

at::Tensor cpu_tensor_at(void* place, const at::Tensor& like) {
  return cpu_tensor(
      c10::Storage(c10::Storage::use_byte_size_t(), like.storage().nbytes(), at::DataPtr(place, c10::DeviceType::CPU),
                   c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true),
      like);
}

// For the making of views, which must not read the memory: the tensor may say that its memory cannot be read.
at::Tensor cpu_place_of(const at::Tensor& tensor) {
  return cpu_tensor_at(tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get(), tensor);
}

// The value that a CPU tensor has now, for a task that runs later.
at::Tensor value_of(const at::Tensor& tensor) {
  at::Tensor copy = zeros_for(tensor);
  std::memcpy(copy.storage().mutable_data(), tensor.storage().data(), tensor.storage().nbytes());
  return copy;
}

// One call of an operator: arguments of the device, and the same for the CPU.
class Call {
 public:
  Call(const c10::OperatorHandle& kernel, const Stack& stack)
      : kernel_(kernel), given_(stack), device_(device_of(stack)), draw_(kernel, stack, device_) {}

  c10::Device device() const { return device_; }

  bool is_view() const {
    const auto& returns = kernel_.schema().returns();
    return !returns.empty() && std::ranges::all_of(returns, [](const c10::Argument& one) {
      return one.alias_info() != nullptr && !one.alias_info()->isWrite();
    });
  }

  // The host needs values of the device for the sizes of the results, or for the results themselves.
  bool is_read() const {
    return kernel_.hasTag(at::Tag::dynamic_output_shape) || kernel_.hasTag(at::Tag::data_dependent_output);
  }

  Stack run_now() {
    Stack cpu = cpu_arguments(/*later=*/false);
    const std::vector<at::Tensor> views = tensors_of(cpu);
    draw_.run(kernel_, cpu);
    draw_.finish();
    return adopt(cpu, views, [](const at::Tensor& made, const at::Tensor& from) {
      std::memcpy(made.storage().mutable_data(), from.storage().data(), from.storage().nbytes());
    });
  }

  // What the kernel makes of zeros tells the sizes of the results. The task then makes the results again.
  Stack run_later(double seconds) {
    Stack trial = cpu_arguments(/*later=*/true, /*zeros=*/true);
    const std::vector<at::Tensor> zeros = tensors_of(trial);
    draw_.run(kernel_, trial);
    std::vector<std::pair<void*, size_t>> places;  // of the results that are new, in the order of the results
    Stack results = adopt(trial, zeros, [&](const at::Tensor& made, const at::Tensor&) {
      places.emplace_back(made.storage().mutable_data(), made.storage().nbytes());
    });
    const Stack cpu = cpu_arguments(/*later=*/true);
    enqueue(current_stream(device_.index()), seconds, [kernel = kernel_, draw = draw_, cpu, places]() mutable {
      std::vector<at::Tensor> views = tensors_of(cpu);
      Stack stack = cpu;
      draw.run(kernel, stack);
      size_t next = 0;
      for (const at::Tensor& made : tensors_of(stack)) {
        if (made.defined() && !is_one_of(made, views)) {
          const auto [place, bytes] = places.at(next++);
          std::memcpy(place, made.storage().data(), std::min(bytes, made.storage().nbytes()));
        }
      }
    });
    draw_.finish();
    return results;
  }

 private:
  static c10::Device device_of(const Stack& stack) {
    for (const at::Tensor& tensor : tensors_of(stack)) {
      if (is_on_sim(tensor)) {
        return tensor.device();
      }
    }
    return sim_device::device(current_device());
  }

  static bool is_one_of(const at::Tensor& tensor, const std::vector<at::Tensor>& known) {
    return std::ranges::any_of(known, [&](const at::Tensor& one) { return one.is_same(tensor); });
  }

  // What a task needs of the arguments: no owners of device memory, and the values that CPU tensors have now.
  Stack cpu_arguments(bool later, bool zeros = false) const {
    Stack arguments;
    for (const IValue& value : given_) {
      if (value.isDevice()) {
        arguments.emplace_back(c10::Device(c10::DeviceType::CPU));
        continue;
      }
      arguments.push_back(with_tensors(value, [&](const at::Tensor& tensor) {
        if (is_on_sim(tensor)) {
          return zeros ? zeros_for(tensor) : is_view() ? cpu_place_of(tensor) : cpu_view_of(tensor);
        }
        return later && tensor.defined() ? value_of(tensor) : tensor;
      }));
    }
    return arguments;
  }

  // Results of the CPU as tensors of the device: an argument, a view of one, or new.
  template <typename Fill>
  Stack adopt(const Stack& results, const std::vector<at::Tensor>& arguments, const Fill& fill) const {
    const std::vector<at::Tensor> given = tensors_of(given_);
    Stack adopted;
    for (const IValue& result : results) {
      adopted.push_back(with_tensors(result, [&](const at::Tensor& tensor) {
        if (!tensor.defined()) {
          return tensor;
        }
        for (size_t i = 0; i < given.size(); ++i) {
          if (tensor.is_same(arguments[i])) {
            if (given[i].sizes() != tensor.sizes()) {  // an `out` that the operator resizes
              given[i].resize_(tensor.sizes());
              fill(given[i], tensor);
            }
            return given[i];
          }
        }
        for (size_t i = 0; i < given.size(); ++i) {
          if (is_on_sim(given[i]) && tensor.is_alias_of(arguments[i])) {
            return view_of(given[i], tensor);
          }
        }
        at::Tensor made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device_));
        fill(made, tensor);
        return made;
      }));
    }
    return adopted;
  }

  static at::Tensor view_of(const at::Tensor& base, const at::Tensor& like) {
    auto view = at::detail::make_tensor<at::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()),
                                                        base.key_set(), like.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    return view;
  }

  c10::OperatorHandle kernel_;
  Stack given_;
  c10::Device device_;
  Draw draw_;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) { run_on_device(op, *stack); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

// Zeros that take no bytes: what derivatives that are zero are.
at::Tensor zero_tensor(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                       std::optional<at::Device> device, std::optional<bool>) {
  static at::native::ZeroTensorAllocator allocator(*device);
  const c10::DispatchKeySet keys({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor});
  return at::detail::empty_generic(sizes, &allocator, keys, dtype.value_or(at::kFloat), std::nullopt);
}

// Without kernels of its own a device would get compositions of other operators for these, with other bits.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  m.impl("_efficientzerotensor", TORCH_FN(zero_tensor));
}

}  // namespace

at::Tensor cpu_view_of(const at::Tensor& tensor) { return cpu_tensor_at(tensor.storage().mutable_data(), tensor); }

void read_by_host(c10::Device device) {
  ++reads;
  run_until(end_of(current_stream(device.index())));
}

int64_t host_reads() { return reads; }

void run_on_device(const c10::OperatorHandle& kernel, Stack& stack) {
  const size_t count = kernel.schema().arguments().size();
  const auto begin = stack.end() - static_cast<std::ptrdiff_t>(count);
  Call call(kernel, Stack(begin, stack.end()));
  stack.erase(begin, stack.end());
  const c10::DeviceGuard device(call.device());
  if (call.is_view()) {
    Stack results = call.run_now();
    std::ranges::move(results, std::back_inserter(stack));
    return;
  }
  take_workspace(kernel.schema().name(), current_stream(call.device().index()));
  if (call.is_read()) {
    read_by_host(call.device());
  }
  const bool is_later = is_lazy() && !call.is_read();
  Stack results = is_later ? call.run_later(kOperatorSeconds) : call.run_now();
  if (!is_later) {
    enqueue(current_stream(call.device().index()), kOperatorSeconds, [] {});
  }
  std::ranges::move(results, std::back_inserter(stack));
}

}  // namespace snug::sim_device
