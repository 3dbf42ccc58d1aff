#pragma once
// SaveCompressed: while the guard lives, what autograd saves for backward is kept in fewer bits. Lossy: gradients become approximate.
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

/// How floating tensors are kept, and by how much an element of FP32 may be off when backward gets it back:
enum class Compression {
  BFloat16,  ///< rounded to nearest: by at most 2^-8 |x|. Half the bytes
  Float16,   ///< rounded to nearest: by at most 2^-11 |x|, or 2^-25 where |x| < 2^-14. Half the bytes
  Int8,  ///< in blocks of 256, by less than (max - min) / 255 of its block; its expectation is exact. 0.258 of the bytes
  Int4,  ///< the same with (max - min) / 15. 0.133 of the bytes
};

struct CompressOptions {
  /// Smaller runs of memory are kept as they are.
  Bytes min_bytes = Bytes(4096);
  /// Of the stochastic rounding. Its random numbers follow from this and the data alone: equal runs give equal bits, other data other
  /// numbers, and the generators that dropout draws from are not touched.
  uint64_t seed = 0;
};

/// Compresses what autograd saves on this thread while it lives, and restores it, with the same sizes, strides, dtype and device, each time
/// backward asks. Tensors that share a storage are compressed once. The forward is not touched.
///
/// What is compressed is what autograd by itself would have in backward: a tensor waits until the next operator that does not write to it, and is
/// compressed again where operators on this thread write to it later in ways that autograd does not count, such as through data().
///
/// Kept as they are: leaves and their views, so parameters and input data, and autocast's copies of parameters; integers; what Float16
/// (beyond 65504) or blocks (infinite, NaN) cannot hold; what would not become smaller; small parts of large storages.
/// Always packed exactly, one bit an element: bool, and leaves of zeros and one other value, as the factors of LibTorch's dropout on CPU.
///
/// The gradient of a weight is a product with a saved activation, so the bounds above carry over: for x W^T, |error of W's gradient| <=
/// |G|^T E with E the bounds of x's elements. What is only compared or exponentiated suffers more: a ReLU's small positive result may come
/// back as zero in Int8 and Int4 (snug::relu keeps an exact bit instead), and log-softmax's result is best left outside.
///
/// On a CPU the cost is about one pass over the data. On other devices Float16, Int8 and Int4 wait for the device once for each tensor.
/// Inside a checkpoint its own rules hold; a checkpoint inside keeps its inputs compressed. The innermost scope alone is asked.
class [[nodiscard]] SaveCompressed final {
 public:
  /// Throws ConfigError if another library sees operators in the way that this does (DispatchKey::Fake).
  explicit SaveCompressed(Compression compression, CompressOptions options = {});
  ~SaveCompressed();
  SaveCompressed(const SaveCompressed&) = delete;
  SaveCompressed& operator=(const SaveCompressed&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace snug
