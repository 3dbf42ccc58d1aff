#include "src/exported/schema_value.h"

#include <utility>

#include <ATen/core/jit_type.h>
#include <ATen/ops/scalar_tensor.h>

namespace snug::detail {
namespace {

at::Tensor wrapped_number(const c10::IValue& value) {
  const auto dtype = value.isDouble()          ? at::kDouble
                     : value.isBool()          ? at::kBool
                     : value.isComplexDouble() ? at::kComplexDouble
                                               : at::kLong;
  at::Tensor wrapped = at::scalar_tensor(value.toScalar(), dtype);
  wrapped.unsafeGetTensorImpl()->set_wrapped_number(true);
  return wrapped;
}

bool is_real_number(const c10::IValue& value) { return value.isInt() || value.isDouble() || value.isBool(); }

}  // namespace

c10::IValue as_type(c10::IValue value, const c10::TypePtr& type) {
  if (type == nullptr || value.isNone()) {
    return value;
  }
  switch (type->kind()) {
    case c10::TypeKind::OptionalType:
      return as_type(std::move(value), type->castRaw<c10::OptionalType>()->getElementType());
    case c10::TypeKind::TensorType:
      return value.isScalar() ? c10::IValue(wrapped_number(value)) : value;
    case c10::TypeKind::FloatType:
      return is_real_number(value) ? c10::IValue(as_double(number_of(value))) : value;
    case c10::TypeKind::IntType:
      return value.isBool() ? c10::IValue(as_int(number_of(value))) : value;
    case c10::TypeKind::BoolType:
      return is_real_number(value) ? c10::IValue(as_bool(number_of(value))) : value;
    default:
      return value;
  }
}

c10::TypePtr element_type(const c10::TypePtr& type) {
  if (type == nullptr) {
    return nullptr;
  }
  const auto optional = type->cast<c10::OptionalType>();
  const auto list = (optional ? optional->getElementType() : type)->cast<c10::ListType>();
  return list ? list->getElementType() : nullptr;
}

PythonNumber number_of(const c10::IValue& value) {
  if (value.isTensor()) {
    return value.toTensor().item<bool>();
  }
  return value.isBool()     ? PythonNumber(value.toBool())
         : value.isDouble() ? PythonNumber(value.toDouble())
                            : PythonNumber(value.toInt());
}

c10::IValue value_of(const PythonNumber& number) {
  return std::visit([](auto any) { return c10::IValue(any); }, number);
}

}  // namespace snug::detail
