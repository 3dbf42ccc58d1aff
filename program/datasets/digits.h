#pragma once
// load_digits: pictures of handwritten digits and their labels. script/setup fetches 5,000 of MNIST's into
// build/data/digits. The files of MNIST itself, and other files in MNIST's format (IDX), are read in the same way.
//
//   const snug::Digits digits = snug::load_digits("build/data/digits");
//   torch::Tensor loss = cross_entropy(model->forward(digits.images), digits.labels);

#include <filesystem>

#include <ATen/core/Tensor.h>

namespace snug {

struct Digits {
  at::Tensor images;  ///< float [N, 1, height, width] on the CPU, from 0 (paper) to 1 (ink); MNIST's are 28 x 28
  at::Tensor labels;  ///< int64 [N], 0 to 9
};

/// Reads `folder`/images-idx3-ubyte and `folder`/labels-idx1-ubyte, in the order of the files. Throws ConfigError,
/// naming the path, if a file is missing or cannot be opened. Throws CorruptFile if:
/// - a file has another format, is shorter or longer than the file's header says, or is empty;
/// - the numbers of labels and images differ;
/// - a label is above 9.
Digits load_digits(const std::filesystem::path& folder);

}  // namespace snug
