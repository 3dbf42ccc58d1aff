// The operators of the simulated accelerator that are not the CPU's: memory, copies, values for the host, convolution.

#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "tests/support/sim_device/sim_allocator.h"
#include "tests/support/sim_device/sim_device.h"
#include "tests/support/sim_device/sim_fallback.h"
#include "tests/support/sim_device/sim_pinned.h"
#include "tests/support/sim_device/sim_stream.h"

namespace snug::sim_device {
namespace {

using at::Tensor;
using torch::jit::Stack;

constexpr c10::DispatchKeySet kSimKeys(c10::DispatchKey::PrivateUse1);

c10::DeviceGuard on(std::optional<c10::Device> device) { return c10::DeviceGuard(c10::device_or_default(device)); }

Tensor sim_empty(c10::IntArrayRef size, std::optional<c10::ScalarType> type, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard = on(device);
  return at::detail::empty_generic(size, device_allocator(), kSimKeys, c10::dtype_or_default(type), format);
}

Tensor sim_empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> type,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard = on(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kSimKeys, c10::dtype_or_default(type));
}

// Makes the storage large enough and keeps what is in it.
void grow(const Tensor& tensor, size_t bytes) {
  const c10::Storage& storage = tensor.storage();
  if (bytes <= storage.nbytes()) {
    return;
  }
  const c10::DeviceGuard guard(tensor.device());
  c10::DataPtr larger = device_allocator()->allocate(bytes);
  enqueue(current_stream(tensor.device().index()), kOperatorSeconds,
          [to = larger.get(), from = storage.data(), kept = storage.nbytes()] {
            if (kept > 0) {
              std::memcpy(to, from, kept);
            }
          });
  storage.set_data_ptr_noswap(std::move(larger));
  storage.set_nbytes(bytes);
}

const Tensor& sim_resize(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != c10::MemoryFormat::Preserve) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  grow(self, static_cast<size_t>(self.storage_offset() + self.numel()) * self.itemsize());
  return self;
}

Tensor& sim_set_places(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size,
                       c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (stride.data() != nullptr) {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  }
  return self;
}

Tensor& sim_set_storage(Tensor& self, c10::Storage source) {
  const auto items = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return sim_set_places(self, std::move(source), 0, {items}, {});
}

Tensor& sim_set_tensor(Tensor& self, const Tensor& source) {
  return sim_set_places(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// The link takes whole blocks.
double link_seconds(const Tensor& copied) {
  const int64_t blocks = (static_cast<int64_t>(copied.nbytes()) + kBlock - 1) / kBlock;
  return static_cast<double>(blocks * kBlock) / kBytesPerSecond;
}

void copy_within(const Tensor& from, const Tensor& to) {
  const c10::Stream stream = current_stream(from.device().index());
  const c10::Stream other = current_stream(to.device().index());
  block(stream, end_of(other));
  enqueue(stream, kOperatorSeconds, [a = cpu_view_of(from), b = cpu_view_of(to)]() mutable { b.copy_(a); });
  block(other, end_of(stream));
}

void copy_to_device(const Tensor& from, const Tensor& to, bool host_goes_on) {
  const c10::Stream stream = current_stream(to.device().index());
  // Pageable memory is read before the call returns.
  const bool is_read_later = host_goes_on && use_pinned(from.storage().data(), stream);
  const Tensor source = is_read_later ? cpu_view_of(from) : from.clone();
  enqueue(stream, link_seconds(to), [source, target = cpu_view_of(to)]() mutable { target.copy_(source); });
}

void copy_to_host(const Tensor& from, const Tensor& to, bool host_goes_on) {
  const c10::Stream stream = current_stream(from.device().index());
  enqueue(stream, link_seconds(from),
          [source = cpu_view_of(from), target = cpu_view_of(to)]() mutable { target.copy_(source); });
  if (!host_goes_on || !use_pinned(to.storage().data(), stream)) {
    read_by_host(from.device());
  }
}

Tensor sim_copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  if (self.numel() == 0) {
    return dst;
  }
  if (self.is_cpu()) {
    copy_to_device(self, dst, non_blocking);
  } else if (dst.is_cpu()) {
    copy_to_host(self, dst, non_blocking);
  } else {
    copy_within(self, dst);
  }
  return dst;
}

Tensor sim_copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return sim_copy_from(self, dst, /*non_blocking=*/false);
}

c10::Scalar sim_value(const Tensor& self) {
  read_by_host(self.device());
  return at::_local_scalar_dense(cpu_view_of(self));
}

void sim_record_stream(Tensor& self, c10::Stream stream) { record_stream(self.storage().data_ptr(), stream); }

c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void sim_convolution(const c10::OperatorHandle&, Stack* stack) {
  run_on_device(operator_named("aten::convolution"), *stack);
}

// The CPU's operator has one argument more, the bias's sizes, which is the number of output channels.
void sim_convolution_backward(const c10::OperatorHandle& op, Stack* stack) {
  const auto begin = stack->end() - static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  const Tensor grad = begin->toTensor();
  stack->insert(begin + 3, c10::IValue(std::vector<int64_t>{grad.size(1)}));
  run_on_device(operator_named("aten::convolution_backward"), *stack);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", sim_empty);
  m.impl("empty_strided", sim_empty_strided);
  m.impl("resize_", sim_resize);
  m.impl("set_.source_Storage_storage_offset", sim_set_places);
  m.impl("set_.source_Storage", sim_set_storage);
  m.impl("set_.source_Tensor", sim_set_tensor);
  m.impl("_copy_from", sim_copy_from);
  m.impl("_copy_from_and_resize", sim_copy_from_and_resize);
  m.impl("_local_scalar_dense", sim_value);
  m.impl("record_stream", sim_record_stream);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&sim_convolution>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&sim_convolution_backward>());
}

}  // namespace
}  // namespace snug::sim_device
