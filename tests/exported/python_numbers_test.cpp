// Python's arithmetic on sizes. The expected values are those that Python 3 prints.

#include "src/exported/python_numbers.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "snug/core.h"

namespace snug::python_numbers_test {
namespace {

using detail::PythonNumber;
constexpr int64_t kMost = std::numeric_limits<int64_t>::max(), kLeast = std::numeric_limits<int64_t>::min();

PythonNumber call(const std::string& name, const std::vector<PythonNumber>& arguments) {
  const auto* function = detail::find_python_function(name);
  if (function == nullptr || function->arguments != arguments.size()) {
    throw std::logic_error(name);
  }
  return function->call(arguments);
}

PythonNumber whole(int64_t value) { return value; }

TEST(PythonNumbers, AreWhatPythonComputes) {
  struct Case {
    std::string name;
    std::vector<PythonNumber> arguments;
    PythonNumber expected;
  };
  const std::vector<Case> cases{
      {"_operator.add", {whole(2), whole(3)}, whole(5)},
      {"_operator.add", {true, whole(3)}, whole(4)},
      {"_operator.add", {whole(2), 0.5}, 2.5},
      {"_operator.sub", {whole(2), whole(3)}, whole(-1)},
      {"_operator.mul", {whole(4), whole(-3)}, whole(-12)},
      {"_operator.floordiv", {whole(7), whole(2)}, whole(3)},
      {"_operator.floordiv", {whole(-7), whole(2)}, whole(-4)},
      {"_operator.floordiv", {whole(7), whole(-2)}, whole(-4)},
      {"_operator.floordiv", {kLeast, whole(3)}, whole(-3074457345618258603)},
      {"_operator.floordiv", {-7.0, whole(2)}, -4.0},
      {"_operator.floordiv", {1.0, 0.1}, 9.0},
      {"_operator.mod", {whole(-7), whole(3)}, whole(2)},
      {"_operator.mod", {whole(7), whole(-3)}, whole(-2)},
      {"_operator.mod", {kLeast, whole(-1)}, whole(0)},
      {"_operator.mod", {-7.5, whole(2)}, 0.5},
      {"_operator.truediv", {whole(7), whole(2)}, 3.5},
      {"_operator.pow", {whole(-3), whole(3)}, whole(-27)},
      {"_operator.pow", {whole(-1), whole(1'000'000'001)}, whole(-1)},
      {"_operator.pow", {whole(0), whole(0)}, whole(1)},
      {"_operator.pow", {whole(2), whole(-1)}, 0.5},
      {"_operator.neg", {whole(3)}, whole(-3)},
      {"_operator.pos", {true}, true},
      {"_operator.and_", {true, false}, false},
      {"_operator.and_", {whole(6), whole(3)}, whole(2)},
      {"_operator.or_", {whole(6), whole(1)}, whole(7)},
      {"_operator.lshift", {whole(3), whole(4)}, whole(48)},
      {"_operator.rshift", {whole(-5), whole(100)}, whole(-1)},
      {"_operator.lt", {whole(2), 2.5}, true},
      {"_operator.eq", {whole(2), true}, false},
      {"torch.sym_max", {whole(2), 2.5}, 2.5},
      {"torch.sym_min", {whole(2), whole(3)}, whole(2)},
      {"torch.sym_int", {-2.7}, whole(-2)},
      {"math.trunc", {2.7}, whole(2)},
      {"torch.sym_float", {whole(2)}, 2.0},
      {"torch._sym_sqrt", {whole(9)}, 3.0},
      {"torch.sym_not", {whole(0)}, true},
      {"torch.sym_ite", {false, whole(1), whole(2)}, whole(2)},
  };
  for (const Case& one : cases) {
    EXPECT_EQ(call(one.name, one.arguments), one.expected) << one.name << " of " << detail::as_double(one.arguments[0]);
  }
}

TEST(PythonNumbers, ThrowWherePythonRaisesOrSixtyFourBitsDoNotSuffice) {
  const std::vector<std::pair<std::string, std::vector<PythonNumber>>> cases{
      {"_operator.floordiv", {whole(1), whole(0)}},
      {"_operator.mod", {1.0, 0.0}},
      {"_operator.truediv", {whole(1), whole(0)}},
      {"_operator.pow", {whole(0), whole(-1)}},
      {"_operator.add", {kMost, whole(1)}},
      {"_operator.floordiv", {kLeast, whole(-1)}},
      {"_operator.pow", {whole(10), whole(19)}},
      {"_operator.lshift", {whole(1), whole(63)}},
      {"_operator.rshift", {whole(1), whole(-1)}},
      {"_operator.neg", {kLeast}},
      {"torch.sym_int", {std::nan("")}},
  };
  for (const auto& [name, arguments] : cases) {
    EXPECT_THROW(call(name, arguments), Error) << name;
  }
}

TEST(PythonNumbers, KnowNoOtherFunctions) { EXPECT_EQ(detail::find_python_function("os.system"), nullptr); }

}  // namespace
}  // namespace snug::python_numbers_test
