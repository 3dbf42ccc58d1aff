#include "bindings/c/arrays.h"

#include <array>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>

#include "bindings/c/errors.h"

namespace snug::c {
namespace {

constexpr std::array<std::pair<snug_dtype, at::ScalarType>, 10> kTypes = {{{SNUG_FLOAT32, at::kFloat},
                                                                           {SNUG_FLOAT64, at::kDouble},
                                                                           {SNUG_FLOAT16, at::kHalf},
                                                                           {SNUG_BFLOAT16, at::kBFloat16},
                                                                           {SNUG_INT64, at::kLong},
                                                                           {SNUG_INT32, at::kInt},
                                                                           {SNUG_INT16, at::kShort},
                                                                           {SNUG_INT8, at::kChar},
                                                                           {SNUG_UINT8, at::kByte},
                                                                           {SNUG_BOOL, at::kBool}}};

at::ScalarType type_of(snug_dtype dtype) {
  for (const auto& [of_c, of_torch] : kTypes) {
    if (of_c == dtype) {
      return of_torch;
    }
  }
  throw ConfigError("array: dtype " + std::to_string(static_cast<int>(dtype)) + " is no snug_dtype");
}

static_assert(sizeof(snug_dtype) == 4 && sizeof(snug_status) == 4, "c.h says that they are of 32 bits");

bool overflows(at::IntArrayRef sizes, int64_t item_bytes) {
  int64_t bytes = item_bytes;
  for (const int64_t size : sizes) {
    if (size > 0 && bytes > std::numeric_limits<int64_t>::max() / size) {
      return true;
    }
    bytes *= size > 0 ? size : 1;
  }
  return false;
}

at::Tensor tensor_of(const snug_array& array) {
  if (array.dimensions > 0) {
    required(array.sizes, "array: sizes");
  }
  const at::IntArrayRef sizes(array.sizes, array.dimensions);
  const at::ScalarType type = type_of(array.dtype);
  bool is_empty = false;
  for (const int64_t size : sizes) {
    if (size < 0) {
      throw ConfigError("array: a size is " + std::to_string(size) + "; give 0 or more");
    }
    is_empty = is_empty || size == 0;
  }
  if (overflows(sizes, static_cast<int64_t>(c10::elementSize(type)))) {
    throw ConfigError("array: the sizes are of more bytes than there can be");
  }
  if (is_empty) {
    return at::empty(sizes, type);
  }
  const auto address = reinterpret_cast<uintptr_t>(array.data);
  if (array.data == nullptr || address % c10::elementSize(type) != 0) {
    throw ConfigError(array.data == nullptr
                          ? "array: data is null"
                          : "array: data does not lie at a multiple of its type's size; copy it there");
  }
  return at::from_blob(array.data, sizes, type);
}

}  // namespace

std::vector<at::Tensor> tensors_of(const snug_array* arrays, size_t count) {
  if (count > 0) {
    required(arrays, "arrays");
  }
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < count; ++i) {
    tensors.push_back(tensor_of(arrays[i]));
  }
  return tensors;
}

snug_array array_of(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) {
    throw ConfigError("array: the tensor is on " + tensor.device().str() +
                      ", and an array is memory of the CPU; save the weights of the model");
  }
  if (!tensor.is_contiguous()) {
    throw ConfigError("array: the tensor is not in the order of C; save the model with contiguous tensors");
  }
  for (const auto& [of_c, of_torch] : kTypes) {
    if (of_torch == tensor.scalar_type()) {
      return {tensor.data_ptr(), tensor.sizes().data(), tensor.sizes().size(), of_c};
    }
  }
  throw ConfigError(std::string("array: ") + c10::toString(tensor.scalar_type()) + " is no type of snug_dtype");
}

}  // namespace snug::c
