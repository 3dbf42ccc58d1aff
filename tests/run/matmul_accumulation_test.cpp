#include "program/run/matmul_accumulation.h"

#include <ATen/Context.h>
#include <gtest/gtest.h>

namespace snug::detail::matmul_accumulation_test {
namespace {

const MatmulAccumulation kAtStart = matmul_accumulation();

TEST(AccumulateMatmulsInFp32, ForbidsLowPrecisionSumsAndTf32) {
  EXPECT_TRUE(kAtStart.fp16_reduction && kAtStart.bf16_reduction) << "LibTorch's default has changed";
  accumulate_matmuls_in_fp32();
  const MatmulAccumulation now = matmul_accumulation();
  EXPECT_FALSE(now.fp16_reduction || now.bf16_reduction || now.fp16_accumulation || now.tf32);
  EXPECT_FALSE(at::globalContext().allowTF32CuDNN());
  accumulate_matmuls_in_fp32(/*allow_tf32=*/true);
  EXPECT_TRUE(matmul_accumulation().tf32);
  EXPECT_TRUE(at::globalContext().allowTF32CuDNN());
  EXPECT_FALSE(matmul_accumulation().fp16_reduction);
  accumulate_matmuls_in_fp32();
  EXPECT_FALSE(matmul_accumulation().tf32);
}

}  // namespace
}  // namespace snug::detail::matmul_accumulation_test
