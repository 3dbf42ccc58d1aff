#pragma once
// SNUG_HOST_DEVICE begins an inline function that nvcc compiles for the GPU, too.

#if defined(__CUDACC__)
#define SNUG_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SNUG_HOST_DEVICE inline
#endif
