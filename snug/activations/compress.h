#pragma once
// SaveCompressed: keeps the tensors that autograd saves for backward in fewer bits, while the guard lives. Lossy:
// gradients become approximate.
//
//   Tensor hidden;
//   {
//     const snug::SaveCompressed narrow(snug::Compression::Int8);
//     hidden = model->hidden(tokens);
//   }
//   auto loss = snug::chunked_cross_entropy(hidden, model->head_weight(), target);   // outside: exact
//   loss.backward();

#include <cstdint>
#include <memory>

#include "snug/core/bytes.h"

namespace snug {

/// The format of floating tensors, and the error bound of an FP32 element x after it is restored in backward:
enum class Compression {
  BFloat16,  ///< rounded to nearest: by at most 2^-8 |x|. Half the bytes
  Float16,   ///< rounded to nearest: by at most 2^-11 |x|, or 2^-25 where |x| < 2^-14. Half the bytes
  Int8,      ///< in blocks of 256, by less than (max - min) / 255 of its block; exact expectation. 0.258 of the bytes
  Int4,      ///< the same with (max - min) / 15. 0.133 of the bytes
};

struct CompressOptions {
  /// Smaller runs of memory are kept as they are.
  Bytes min_bytes = Bytes(4096);
  /// Seed of the stochastic rounding. Its random numbers depend only on the seed and the data: equal runs give equal
  /// bits, other data get other numbers, and the generators that dropout draws from are not touched.
  uint64_t seed = 0;
};

/// Compresses the tensors that autograd saves on this thread while it lives. Restores them, with the same sizes,
/// strides, dtype and device, each time backward asks. Tensors that share a storage are compressed once. The forward is
/// not touched.
///
/// The compressed values are those that autograd by itself would have in backward. Therefore a tensor is compressed
/// only at the next operator that does not write to it. It is compressed again if operators on this thread write to it
/// later in ways that autograd does not count, such as through data().
///
/// Kept uncompressed:
/// - leaves and their views, such as parameters and input data, and autocast's copies of parameters;
/// - integers;
/// - values that the format cannot hold: beyond 65504 for Float16, infinite or NaN for blocks;
/// - tensors that would not become smaller;
/// - small parts of large storages.
/// Always packed exactly, one bit an element: bool, and leaves whose elements are zero or one other value, such as the
/// factors of LibTorch's dropout on the CPU.
///
/// The gradient of a weight is a product with a saved activation, so the bounds above carry over: for x W^T, |error of
/// W's gradient| <= |G|^T E, with G the gradient of the result and E the bounds of x's elements. Comparisons and
/// exponentials suffer more: a ReLU's small positive result may come back as zero in Int8 and Int4 (snug::relu keeps an
/// exact bit instead), and log-softmax's result is best left outside.
///
/// On a CPU the cost is about one pass over the data. On other devices Float16, Int8 and Int4 wait for the device once
/// for each tensor. Inside a checkpoint, the checkpoint's own rules hold; a checkpoint inside this scope keeps its
/// inputs compressed. Only the innermost scope is asked.
class [[nodiscard]] SaveCompressed final {
 public:
  /// Throws ConfigError if another library observes operators in the same way (DispatchKey::Fake).
  explicit SaveCompressed(Compression compression, CompressOptions options = {});
  ~SaveCompressed();
  SaveCompressed(const SaveCompressed&) = delete;
  SaveCompressed& operator=(const SaveCompressed&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace snug
