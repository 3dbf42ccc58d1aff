#pragma once
// What tests of tensors need: comparison to the bit, copies of parameters and gradients, and the text of an expected
// error.
//
//   EXPECT_TRUE(same_bits(gradients_of(*a), gradients_of(*b)));
//   EXPECT_THAT(error_of<ConfigError>([&] { Stepper(model, optimizer, {.micro_batch = -1}); }),
//               HasSubstr("micro_batch is -1"));

#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace snug::testing {

using torch::Tensor;

/// Same shape, dtype and bits (so NaN equals the same NaN, and -0 differs from 0).
inline ::testing::AssertionResult same_bits(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined()) {
    return a.defined() == b.defined() ? ::testing::AssertionSuccess()
                                      : ::testing::AssertionFailure() << "one of the tensors is undefined";
  }
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) {
    return ::testing::AssertionFailure() << "shape or dtype differ: " << a.sizes() << " " << a.scalar_type() << " and "
                                         << b.sizes() << " " << b.scalar_type();
  }
  const Tensor x = a.detach().contiguous().flatten().view(torch::kUInt8);
  const Tensor y = b.detach().contiguous().flatten().view(torch::kUInt8);
  if (torch::equal(x, y)) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure()
         << "values differ by up to "
         << (a.detach().to(torch::kDouble) - b.detach().to(torch::kDouble)).abs().max().item<double>();
}

inline ::testing::AssertionResult same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  if (a.size() != b.size()) {
    return ::testing::AssertionFailure() << a.size() << " tensors and " << b.size();
  }
  for (size_t i = 0; i < a.size(); ++i) {
    if (auto same = same_bits(a[i], b[i]); !same) {
      return ::testing::AssertionFailure() << "tensor " << i << ": " << same.message();
    }
  }
  return ::testing::AssertionSuccess();
}

/// ||a - b|| <= bound * ||b||, in double precision.
inline ::testing::AssertionResult close_in_norm(const Tensor& a, const Tensor& b, double bound) {
  const double scale = b.detach().to(torch::kDouble).norm().item<double>();
  const double error = (a.detach().to(torch::kDouble) - b.detach().to(torch::kDouble)).norm().item<double>();
  if (error <= bound * scale) {
    return ::testing::AssertionSuccess();
  }
  return ::testing::AssertionFailure() << "norm of the difference is " << error << ", " << error / scale << " of "
                                       << scale << "; the bound is " << bound;
}

/// The same of each tensor.
inline ::testing::AssertionResult close_in_norm(const std::vector<Tensor>& a, const std::vector<Tensor>& b,
                                                double bound) {
  if (a.size() != b.size()) {
    return ::testing::AssertionFailure() << a.size() << " tensors and " << b.size();
  }
  for (size_t i = 0; i < a.size(); ++i) {
    if (auto close = close_in_norm(a[i], b[i], bound); !close) {
      return ::testing::AssertionFailure() << "tensor " << i << ": " << close.message();
    }
  }
  return ::testing::AssertionSuccess();
}

inline std::vector<Tensor> clones_of(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> copies;
  for (const Tensor& tensor : tensors) {
    copies.push_back(tensor.defined() ? tensor.detach().clone() : Tensor());
  }
  return copies;
}

/// The bytes of the elements, tensor after tensor, in memory that no budget counts. Elements that lie on the same
/// memory, as expand() makes, are repeated.
inline std::string bits_of(const std::vector<Tensor>& tensors) {
  std::string bits;
  for (const Tensor& tensor : tensors) {
    const Tensor dense = tensor.detach().contiguous();
    bits.append(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
  }
  return bits;
}

/// Writes `values` to the memory of `target`. Elements that lie on the same memory, as expand() makes, are written
/// once; copy_() refuses such tensors.
inline void overwrite(Tensor target, Tensor values) {
  const torch::NoGradGuard no_grad;
  for (int64_t dim = 0; target.layout() == torch::kStrided && dim < target.dim(); ++dim) {
    if (target.stride(dim) == 0 && target.size(dim) > 1) {
      target = target.narrow(dim, 0, 1);
      values = values.narrow(dim, 0, 1);
    }
  }
  target.copy_(values);
}

inline std::vector<Tensor> gradients_of(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> gradients;
  for (const Tensor& parameter : parameters) {
    gradients.push_back(parameter.grad().defined() ? parameter.grad().detach().clone() : Tensor());
  }
  return gradients;
}

inline std::vector<Tensor> gradients_of(const torch::nn::Module& model) { return gradients_of(model.parameters()); }

inline int64_t bytes_of(const std::vector<Tensor>& tensors) {
  int64_t bytes = 0;
  for (const Tensor& tensor : tensors) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

/// The message of the E that `call` throws. Another exception, or none, fails the test.
template <class E, class Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& other) {
    ADD_FAILURE() << "another error than expected: " << other.what();
    return {};
  }
  ADD_FAILURE() << "no error";
  return {};
}

}  // namespace snug::testing
