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
/// The number without its fraction, as int() returns. Throws Error if int64_t cannot represent the number.
int64_t as_int(const PythonNumber& value);
bool as_bool(const PythonNumber& value);

struct PythonFunction {
  std::string_view name;  // the name in the file: "_operator.add"
  size_t arguments;
  PythonNumber (*call)(std::span<const PythonNumber>);  // throws Error if Python raises
};

/// Returns null for an unknown name.
const PythonFunction* find_python_function(std::string_view name);

}  // namespace snug::detail
