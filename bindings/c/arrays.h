#pragma once
// Arrays of C and tensors.

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

#include "snug/c.h"

namespace snug::c {

/// Tensors on the arrays' memory. Throws ConfigError for what is no array.
std::vector<at::Tensor> tensors_of(const snug_array* arrays, size_t count);

/// The array of a dense tensor, which must outlive it. Throws ConfigError for a tensor of a device, and for types that
/// snug_dtype lacks.
snug_array array_of(const at::Tensor& tensor);

}  // namespace snug::c
