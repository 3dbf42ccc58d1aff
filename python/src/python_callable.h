#pragma once
// Python functions that C++ calls while Python's lock (the GIL) is released, and the errors that pass between them.

#include <memory>
#include <utility>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "snug/core.h"

namespace snug::python {

/// Calls `part` with the lock held. An error that is pending in this thread is of a backward pass through a function of
/// Python's, which C++ has caught since: it is dropped. Python's torch.OutOfMemoryError becomes C++'s, which snug looks
/// for: the same step may have thrown it as one of C++, and it has come through Python's frames since. So does
/// BudgetExceeded.
template <class Part>
auto with_lock(Part&& part) {
  const pybind11::gil_scoped_acquire lock;
  PyErr_Clear();
  try {
    return std::forward<Part>(part)();
  } catch (const pybind11::error_already_set& error) {
    if (error.matches(pybind11::module_::import("snug._errors").attr("BudgetExceeded"))) {
      throw BudgetExceeded(pybind11::str(error.value()),
                           Bytes(error.value().attr("smallest_feasible").cast<int64_t>()));
    }
    if (error.matches(pybind11::module_::import("torch").attr("OutOfMemoryError"))) {
      const std::string what = pybind11::str(error.value());
      C10_THROW_ERROR(OutOfMemoryError, what);
    }
    throw;
  }
}

/// Holds an object of Python's. May be copied and destroyed without the lock.
template <class Object>
class Shared {
 public:
  /// With the lock.
  explicit Shared(Object object)
      : object_(new Object(std::move(object)), [](Object* one) {
          const pybind11::gil_scoped_acquire lock;
          delete one;
        }) {}
  const Object& operator*() const { return *object_; }
  const Object* operator->() const { return object_.get(); }

 private:
  std::shared_ptr<Object> object_;
};

}  // namespace snug::python
