#pragma once
// Precision: the floating-point type of the forward pass, and a choice of it by measurement.
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

/// Billions of floating-point operations a second in square matrix products on the device. 0: the device has no
/// products of that type, or is too slow to measure in time.
struct MatmulSpeed {
  double float32 = 0;
  double bfloat16 = 0;
  double float16 = 0;        ///< a small product, so that a CPU without FP16 instructions answers in milliseconds
  double float32_small = 0;  ///< the same small product, to compare float16 with
};
/// Takes less than 100 ms, beside the time that libraries need to start, which the first training step would need as
/// well.
MatmulSpeed measure_matmul_speed(c10::Device device);

/// Chooses the precision:
/// - BFloat16 if its products are at least 1.2 times as fast as FP32's, because casts cost time too. It comes first,
///   because it needs no loss scaling;
/// - else Float16 if the same holds for it, on devices other than a CPU: GPUs before Ampere have fast FP16, but hardly
///   any BF16;
/// - else Float32.
Precision choose_precision(const MatmulSpeed& speed, c10::DeviceType device);

/// choose_precision of a measurement that is made once per device and process.
Precision measured_precision(c10::Device device);

/// The accuracy that LibTorch lets CUDA's matrix products give up for speed. The settings belong to the process.
struct MatmulAccumulation {
  bool fp16_reduction = true;      ///< partial sums of FP16 products may be added in FP16; LibTorch's default
  bool bf16_reduction = true;      ///< the same for BF16
  bool fp16_accumulation = false;  ///< FP16 products may sum in FP16 throughout
  bool tf32 = false;               ///< FP32 products may round their inputs to TF32, which has a mantissa of 10 bits
};
/// The settings of this process now.
MatmulAccumulation matmul_accumulation();

/// From now on, in the whole process, 16-bit matrix products sum in FP32. FP32 products, those of convolutions
/// included, use TF32 only if allowed. Changes nothing on most CPUs, whose 16-bit products sum in FP32 already.
void accumulate_matmuls_in_fp32(bool allow_tf32 = false);

}  // namespace snug
