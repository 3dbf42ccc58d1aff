#pragma once
// Values as the schema of an operator wants them.

#include <ATen/core/ivalue.h>

#include "src/exported/python_numbers.h"

namespace snug::detail {

/// `value` as `type`, where Python converts without a word: a number for a tensor becomes a tensor that does not decide
/// the result's dtype, an int for a float becomes one. What fits no way stays as it is. A null type wants nothing.
c10::IValue as_type(c10::IValue value, const c10::TypePtr& type);

/// The type of a list's elements, also of a list that may be missing; null for all else.
c10::TypePtr element_type(const c10::TypePtr& type);

/// A number, or a tensor of one element. Throws c10::Error for all else.
PythonNumber number_of(const c10::IValue& value);
c10::IValue value_of(const PythonNumber& number);

}  // namespace snug::detail
