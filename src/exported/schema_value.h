#pragma once
// Values in the types of an operator's schema.

#include <ATen/core/ivalue.h>

#include "src/exported/python_numbers.h"

namespace snug::detail {

/// Converts `value` to `type` like Python's silent conversions: a number becomes a tensor that does not decide the
/// result's dtype, if `type` is a tensor; an int becomes a float, if `type` is a float. A value that does not fit stays
/// unchanged, and so do all values if `type` is null.
c10::IValue as_type(c10::IValue value, const c10::TypePtr& type);

/// The type of the elements of a list or an optional list; null for other types.
c10::TypePtr element_type(const c10::TypePtr& type);

/// The number in a number or in a tensor of a single element. Throws c10::Error for other values.
PythonNumber number_of(const c10::IValue& value);
c10::IValue value_of(const PythonNumber& number);

}  // namespace snug::detail
