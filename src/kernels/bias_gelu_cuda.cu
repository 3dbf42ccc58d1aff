#include <algorithm>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "src/kernels/bias_gelu_cuda.h"
#include "src/kernels/gelu_math.h"

namespace snug::kernels::detail {
namespace {

constexpr int kThreads = 256;
constexpr int kMostBlocks = 4096;  // several for each multiprocessor; beyond them a thread takes more rows
constexpr int kPacketBytes = 16;   // the widest load of a thread

/// N neighbours in a row, loaded at once.
template <class T, int N>
struct alignas(sizeof(T) * N) Packet {
  T values[N];
};

__device__ float load(float a) { return a; }
__device__ float load(__half a) { return __half2float(a); }
__device__ float load(__nv_bfloat16 a) { return __bfloat162float(a); }

__device__ void store(float a, float& to) { to = a; }
__device__ void store(float a, __half& to) { to = __float2half_rn(a); }
__device__ void store(float a, __nv_bfloat16& to) { to = __float2bfloat16_rn(a); }

struct Forward {
  template <class T, int N>
  static __device__ Packet<T, N> apply(const Packet<T, N>&, const Packet<T, N>& x, const Packet<T, N>& bias) {
    Packet<T, N> y;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      store(gelu(load(x.values[i]) + load(bias.values[i])), y.values[i]);
    }
    return y;
  }
};

struct Backward {
  template <class T, int N>
  static __device__ Packet<T, N> apply(const Packet<T, N>& dy, const Packet<T, N>& x, const Packet<T, N>& bias) {
    Packet<T, N> dx;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      store(load(dy.values[i]) * gelu_derivative(load(x.values[i]) + load(bias.values[i])), dx.values[i]);
    }
    return dx;
  }
};

/// A thread takes the packet of one column in every row that is its own, so that it reads the bias once and never
/// divides. `dy` is null in the forward direction, `bias` where there is none.
template <class Function, class T, int N>
__global__ void by_columns(const T* dy, const T* x, const T* bias, T* out, int64_t rows, int64_t columns) {
  using Pack = Packet<T, N>;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * N;
  if (column >= columns) {
    return;
  }
  Pack b{};
  if (bias != nullptr) {
    b = *reinterpret_cast<const Pack*>(bias + column);
  }
  const int64_t stride = static_cast<int64_t>(gridDim.y) * blockDim.y;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; row < rows; row += stride) {
    const int64_t at = row * columns + column;
    const Pack in = *reinterpret_cast<const Pack*>(x + at);
    const Pack upstream = dy != nullptr ? *reinterpret_cast<const Pack*>(dy + at) : Pack{};
    *reinterpret_cast<Pack*>(out + at) = Function::apply(upstream, in, b);
  }
}

template <class T>
struct Arguments {
  const T* dy;
  const T* x;
  const T* bias;
  T* out;

  bool aligned() const {
    return ((reinterpret_cast<uintptr_t>(dy) | reinterpret_cast<uintptr_t>(x) | reinterpret_cast<uintptr_t>(bias) |
             reinterpret_cast<uintptr_t>(out)) %
            kPacketBytes) == 0;
  }
  Arguments from(int64_t element) const {
    return {dy == nullptr ? nullptr : dy + element, x + element, bias, out + element};
  }
};

template <class Function, int N, class T>
int launch(const Arguments<T>& a, int64_t rows, int64_t columns, cudaStream_t stream) {
  if (rows == 0 || columns == 0) {
    return cudaSuccess;
  }
  const int64_t packets = columns / N;
  int width = 1;
  while (width < kThreads && width < packets) {
    width *= 2;
  }
  const int height = kThreads / width;
  const int64_t across = (packets + width - 1) / width;
  const int64_t down = std::min((rows + height - 1) / height, std::max<int64_t>(1, kMostBlocks / across));
  const dim3 grid(static_cast<unsigned>(across), static_cast<unsigned>(down));
  const dim3 block(static_cast<unsigned>(width), static_cast<unsigned>(height));
  by_columns<Function, T, N><<<grid, block, 0, stream>>>(a.dy, a.x, a.bias, a.out, rows, columns);
  return cudaGetLastError();
}

template <class Function, class T>
int launch(Arguments<T> a, BiasGeluShape shape, void* stream_pointer) {
  constexpr int kPacket = kPacketBytes / sizeof(T);
  const auto stream = static_cast<cudaStream_t>(stream_pointer);
  if (a.bias != nullptr) {
    return a.aligned() && shape.columns % kPacket == 0 ? launch<Function, kPacket>(a, shape.rows, shape.columns, stream)
                                                       : launch<Function, 1>(a, shape.rows, shape.columns, stream);
  }
  // Without a bias rows mean nothing: one long row, whose last few elements go one by one.
  const int64_t count = shape.rows * shape.columns;
  const int64_t whole = a.aligned() ? count - count % kPacket : 0;
  const int error = launch<Function, kPacket>(a, 1, whole, stream);
  return error != cudaSuccess ? error : launch<Function, 1>(a.from(whole), 1, count - whole, stream);
}

template <class Function, class T>
int launch(const void* dy, const void* x, const void* bias, void* out, BiasGeluShape shape, void* stream) {
  return launch<Function, T>(
      {static_cast<const T*>(dy), static_cast<const T*>(x), static_cast<const T*>(bias), static_cast<T*>(out)}, shape,
      stream);
}

template <class Function>
int launch(KernelDtype dtype, const void* dy, const void* x, const void* bias, void* out, BiasGeluShape shape,
           void* stream) {
  switch (dtype) {
    case KernelDtype::kFloat32:
      return launch<Function, float>(dy, x, bias, out, shape, stream);
    case KernelDtype::kFloat16:
      return launch<Function, __half>(dy, x, bias, out, shape, stream);
    case KernelDtype::kBFloat16:
      return launch<Function, __nv_bfloat16>(dy, x, bias, out, shape, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

int launch_bias_gelu(KernelDtype dtype, const void* x, const void* bias, void* y, BiasGeluShape shape, void* stream) {
  return launch<Forward>(dtype, nullptr, x, bias, y, shape, stream);
}

int launch_bias_gelu_backward(KernelDtype dtype, const void* dy, const void* x, const void* bias, void* dx,
                              BiasGeluShape shape, void* stream) {
  return launch<Backward>(dtype, dy, x, bias, dx, shape, stream);
}

}  // namespace snug::kernels::detail
