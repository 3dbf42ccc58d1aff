#pragma once
// The functions of Python that an exported graph calls on sizes (`batch // 2`), with Python's results: division rounds
// down, a remainder has the divisor's sign, and whole numbers that do not fit into 64 bits are an error.

#include <cstdint>
#include <span>
#include <string_view>
#include <variant>

namespace snug::detail {

using PythonNumber = std::variant<bool, int64_t, double>;

double as_double(const PythonNumber& value);
/// Without its fraction, as int() does it. Throws Error if it has no such number.
int64_t as_int(const PythonNumber& value);
bool as_bool(const PythonNumber& value);

struct PythonFunction {
  std::string_view name;  // as in the file: "_operator.add"
  size_t arguments;
  PythonNumber (*call)(std::span<const PythonNumber>);  // throws Error where Python raises
};

/// Null if there is none of this name.
const PythonFunction* find_python_function(std::string_view name);

}  // namespace snug::detail
