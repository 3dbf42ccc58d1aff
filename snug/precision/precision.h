#pragma once
// Precision: which floating-point type the forward pass computes in, and a choice of it by measurement.
//
//   const auto speed = snug::measure_matmul_speed(device);                    // once, under a tenth of a second
//   snug::Precision p = snug::choose_precision(speed, device.type());         // 16 bits only where they are faster

#include <string_view>

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

namespace snug {

enum class Precision {
  Float32,
  BFloat16,  ///< autocast to BF16; FP32 weights
  Float16,   ///< autocast to FP16 with loss scaling; FP32 weights
  Auto,      ///< measured once by choose_precision; never Float16 on a CPU
};

/// "float32", "bfloat16", "float16", "auto".
std::string_view to_string(Precision);
/// Throws ConfigError and lists the names.
Precision precision_from_string(std::string_view name);
/// The type to autocast to; Float32 gives kFloat. Throws ConfigError for Auto, which is a question, not an answer.
c10::ScalarType compute_dtype(Precision);

/// Billions of floating-point operations a second in square matrix products on the device. 0: the device has none of that type, or is too
/// slow to tell in time.
struct MatmulSpeed {
  double float32 = 0;
  double bfloat16 = 0;
  double float16 = 0;        ///< a small product, so that a CPU without FP16 instructions answers in milliseconds
  double float32_small = 0;  ///< the same small product, to compare float16 with
};
/// Takes less than 100 ms, besides what libraries need to start, which the first training step would need as well.
MatmulSpeed measure_matmul_speed(c10::Device device);

/// BFloat16 where its products are at least 1.2 times as fast as FP32's, as casts cost time too. Else Float16 where the same holds for
/// it, on other devices than a CPU: what came before Ampere has fast FP16 and no BF16 to speak of. BF16 goes first, as it needs
/// no loss scaling. Else Float32.
Precision choose_precision(const MatmulSpeed& speed, c10::DeviceType device);

/// choose_precision of a measurement that is made once per device and process.
Precision measured_precision(c10::Device device);

/// What LibTorch lets CUDA's matrix products give up for speed. The settings are the process's.
struct MatmulAccumulation {
  bool fp16_reduction = true;      ///< partial sums of FP16 products may be added in FP16; LibTorch's default
  bool bf16_reduction = true;      ///< the same for BF16
  bool fp16_accumulation = false;  ///< FP16 products may sum in FP16 throughout
  bool tf32 = false;               ///< FP32 products may round their inputs to TF32, which has a mantissa of 10 bits
};
MatmulAccumulation matmul_accumulation();

/// Sums of 16-bit matrix products in FP32 from now on, in the whole process; FP32 products, those of convolutions included, in TF32 only if
/// allowed. Changes nothing on most CPUs, whose 16-bit
/// products sum in FP32 already.
void accumulate_matmuls_in_fp32(bool allow_tf32 = false);

}  // namespace snug
