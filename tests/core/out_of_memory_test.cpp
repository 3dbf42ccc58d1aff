#include <new>
#include <stdexcept>
#include <string>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include "snug/core.h"
#include "snug/state.h"
#include "src/core/limit_below_use.h"

namespace snug::out_of_memory_test {
namespace {

c10::Error of_libtorch(const std::string& text) { return {{__func__, __FILE__, __LINE__}, text}; }

TEST(OutOfMemory, IsRecognisedWhoeverAllocates) {
  EXPECT_TRUE(is_out_of_memory(c10::OutOfMemoryError({__func__, __FILE__, __LINE__}, "full")));
  for (const char* text :
       {"CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
        "cuFFT error: CUFFT_ALLOC_FAILED", "CUDA out of memory. Tried to allocate 2.00 MiB",
        "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"}) {
    EXPECT_TRUE(is_out_of_memory(of_libtorch(text))) << text;
  }
}

TEST(OutOfMemory, IsRecognisedBehindAnInterpreter) {
  for (const char* text : {"The following operation failed in the TorchScript interpreter.\nTraceback: ...\n"
                           "RuntimeError: MemoryLimit: an allocation of 64.00 KiB on cpu would make 3.83 MiB",
                           "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB"}) {
    EXPECT_TRUE(is_out_of_memory(std::runtime_error(text))) << text;
    EXPECT_TRUE(is_out_of_memory(of_libtorch(text))) << text;  // TorchScript's, from LibTorch 2.15 on
  }
}

TEST(OutOfMemory, IsNoOtherFailure) {
  EXPECT_FALSE(is_out_of_memory(of_libtorch("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED")));
  EXPECT_FALSE(is_out_of_memory(of_libtorch("CUDA error: device-side assert triggered")));
  EXPECT_FALSE(is_out_of_memory(std::runtime_error("out of patience")));
  EXPECT_FALSE(is_out_of_memory(std::bad_alloc()));
  EXPECT_FALSE(is_out_of_memory(Error("CUDA out of memory")));
  EXPECT_FALSE(is_out_of_memory(ConfigError("MemoryLimit: an allocation of")));
  EXPECT_TRUE(is_out_of_memory(detail::LimitBelowUse("more is taken")));
}

}  // namespace
}  // namespace snug::out_of_memory_test
