#include "src/exported/python_numbers.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <fmt/format.h>

#include "snug/core.h"

namespace snug::detail {
namespace {

using Arguments = std::span<const PythonNumber>;

[[noreturn]] void too_large() { throw Error("a size does not fit into 64 bits"); }

int64_t add(int64_t a, int64_t b) {
  int64_t result = 0;
  return __builtin_add_overflow(a, b, &result) ? (too_large(), 0) : result;
}
int64_t subtract(int64_t a, int64_t b) {
  int64_t result = 0;
  return __builtin_sub_overflow(a, b, &result) ? (too_large(), 0) : result;
}
int64_t multiply(int64_t a, int64_t b) {
  int64_t result = 0;
  return __builtin_mul_overflow(a, b, &result) ? (too_large(), 0) : result;
}
double add(double a, double b) { return a + b; }
double subtract(double a, double b) { return a - b; }
double multiply(double a, double b) { return a * b; }

template <class T>
T divisor(T b) {
  if (b == 0) {
    throw Error("a size is divided by 0");
  }
  return b;
}

double remainder_of(double a, double b) {
  const double rest = std::fmod(a, divisor(b));
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : std::copysign(rest, rest == 0 ? b : rest);
}
int64_t remainder_of(int64_t a, int64_t b) {
  const int64_t rest = divisor(b) == -1 ? 0 : a % b;  // INT64_MIN % -1 traps
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

double floor_divide(double a, double b) {
  const double quotient = (a - remainder_of(a, b)) / b, down = std::floor(quotient);
  return quotient == 0 ? std::copysign(0.0, a / b) : quotient - down > 0.5 ? down + 1 : down;
}
int64_t floor_divide(int64_t a, int64_t b) {
  return divisor(b) == -1 ? subtract(0, a) : a / b - (remainder_of(a, b) != a % b ? 1 : 0);
}

double true_divide(double a, double b) { return a / divisor(b); }
double true_divide(int64_t a, int64_t b) { return static_cast<double>(a) / static_cast<double>(divisor(b)); }

PythonNumber power(double a, double b) { return std::pow(a, b); }
PythonNumber power(int64_t a, int64_t b) {
  if (b < 0) {
    return std::pow(static_cast<double>(divisor(a)), static_cast<double>(b));
  }
  if (a == 0 || a == 1 || a == -1 || b == 0) {
    return b % 2 == 0 ? (b == 0 ? 1 : a * a) : a;
  }
  int64_t result = 1;
  for (; b > 0; --b) {  // at most 63 times
    result = multiply(result, a);
  }
  return result;
}

int64_t shift_left(int64_t a, int64_t b) {
  if (b < 0 || b > 62) {
    too_large();
  }
  return multiply(a, int64_t{1} << b);
}
int64_t shift_right(int64_t a, int64_t b) { return b < 0 ? (too_large(), 0) : a >> std::min<int64_t>(b, 63); }

template <class F>
PythonNumber on_both(Arguments a, F f) {
  const bool is_float = std::holds_alternative<double>(a[0]) || std::holds_alternative<double>(a[1]);
  return is_float ? PythonNumber(f(as_double(a[0]), as_double(a[1]))) : PythonNumber(f(as_int(a[0]), as_int(a[1])));
}

template <class F>
PythonNumber on_bits(Arguments a, F f) {
  const bool is_bool = std::holds_alternative<bool>(a[0]) && std::holds_alternative<bool>(a[1]);
  const int64_t result = f(as_int(a[0]), as_int(a[1]));
  return is_bool ? PythonNumber(result != 0) : PythonNumber(result);
}

#define SNUG_ON_BOTH(name, result)                                                         \
  PythonFunction {                                                                         \
    name, 2, [](Arguments a) { return on_both(a, [](auto x, auto y) { return result; }); } \
  }
constexpr std::array kFunctions{
    SNUG_ON_BOTH("_operator.add", add(x, y)),
    SNUG_ON_BOTH("_operator.sub", subtract(x, y)),
    SNUG_ON_BOTH("_operator.mul", multiply(x, y)),
    SNUG_ON_BOTH("_operator.eq", x == y),
    SNUG_ON_BOTH("_operator.ne", x != y),
    SNUG_ON_BOTH("_operator.lt", x < y),
    SNUG_ON_BOTH("_operator.le", x <= y),
    SNUG_ON_BOTH("_operator.gt", x > y),
    SNUG_ON_BOTH("_operator.ge", x >= y),
    SNUG_ON_BOTH("_operator.floordiv", floor_divide(x, y)),
    SNUG_ON_BOTH("_operator.mod", remainder_of(x, y)),
    SNUG_ON_BOTH("_operator.pow", power(x, y)),
    SNUG_ON_BOTH("_operator.truediv", true_divide(x, y)),
    SNUG_ON_BOTH("torch.sym_max", std::max(x, y)),
    SNUG_ON_BOTH("torch.sym_min", std::min(x, y)),
    PythonFunction{"_operator.and_", 2, [](Arguments a) { return on_bits(a, [](auto x, auto y) { return x & y; }); }},
    PythonFunction{"_operator.or_", 2, [](Arguments a) { return on_bits(a, [](auto x, auto y) { return x | y; }); }},
    PythonFunction{"_operator.lshift", 2,
                   [](Arguments a) -> PythonNumber { return shift_left(as_int(a[0]), as_int(a[1])); }},
    PythonFunction{"_operator.rshift", 2,
                   [](Arguments a) -> PythonNumber { return shift_right(as_int(a[0]), as_int(a[1])); }},
    PythonFunction{"_operator.neg", 1,
                   [](Arguments a) {
                     const auto* number = std::get_if<double>(&a[0]);
                     return number != nullptr ? PythonNumber(-*number) : PythonNumber(subtract(0, as_int(a[0])));
                   }},
    PythonFunction{"_operator.pos", 1, [](Arguments a) { return a[0]; }},
    PythonFunction{"math.trunc", 1, [](Arguments a) -> PythonNumber { return as_int(a[0]); }},
    PythonFunction{"torch.sym_int", 1, [](Arguments a) -> PythonNumber { return as_int(a[0]); }},
    PythonFunction{"torch.sym_float", 1, [](Arguments a) -> PythonNumber { return as_double(a[0]); }},
    PythonFunction{"torch._sym_sqrt", 1, [](Arguments a) -> PythonNumber { return std::sqrt(as_double(a[0])); }},
    PythonFunction{"torch.sym_not", 1, [](Arguments a) -> PythonNumber { return !as_bool(a[0]); }},
    PythonFunction{"torch.sym_ite", 3, [](Arguments a) { return as_bool(a[0]) ? a[1] : a[2]; }},
};
#undef SNUG_ON_BOTH

}  // namespace

double as_double(const PythonNumber& value) {
  return std::visit([](auto number) { return static_cast<double>(number); }, value);
}

int64_t as_int(const PythonNumber& value) {
  const auto* number = std::get_if<double>(&value);
  if (number != nullptr && !(std::abs(*number) < 0x1p63)) {
    throw Error(fmt::format("{} is no size", *number));
  }
  return std::visit([](auto any) { return static_cast<int64_t>(any); }, value);
}

bool as_bool(const PythonNumber& value) {
  return std::visit([](auto number) { return number != 0; }, value);
}

const PythonFunction* find_python_function(std::string_view name) {
  const auto* found =
      std::find_if(kFunctions.begin(), kFunctions.end(), [&](const auto& one) { return one.name == name; });
  return found == kFunctions.end() ? nullptr : found;
}

}  // namespace snug::detail
