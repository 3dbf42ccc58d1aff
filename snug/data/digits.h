#pragma once
// load_digits: pictures of handwritten digits and what they show. script/setup fetches 5,000 of MNIST's into build/data/digits; the files
// of MNIST itself, and others in its format (IDX), are read the same.
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

/// Reads `folder`/images-idx3-ubyte and `folder`/labels-idx1-ubyte, in the order that they have there. Throws ConfigError, naming the path,
/// if a file is missing or cannot be opened; CorruptFile if one is not of the format, shorter or longer than its header says, empty, if the
/// two differ in number, or if a label is above 9.
Digits load_digits(const std::filesystem::path& folder);

}  // namespace snug
