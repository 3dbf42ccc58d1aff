#pragma once
// PrecisionGuardOptions: when a Stepper computes a part of a model in FP32 because 16 bits overflow or underflow, and
// when the part goes back to 16 bits. See SixteenBitOptions::guard.

#include <cstdint>
#include <optional>

namespace snug {

struct PrecisionGuardOptions {
  /// The number of steps in a row with trouble before a region moves to FP32. 0: no guard. Not given: kPatienceOfAuto
  /// for a Stepper with Precision::Auto, otherwise no guard. With loss scaling, the patience must be larger than the
  /// scaler's own search for a scale, which takes up to 16 steps from 2^16.
  std::optional<int64_t> patience = {};
  /// The number of steps in FP32 before 16 bits are tried again. The number doubles with each relapse.
  int64_t stay = 200;
  /// A larger share of zero gradients is also trouble, unless FP32 shows as many zero gradients (dead units, unused
  /// rows of an embedding).
  double underflow = 0.5;

  static constexpr int64_t kPatienceOfAuto = 20;
};

}  // namespace snug
