// The module _snug: snug's C++ library in Python. The package snug (python/snug) is what people use.

#include <any>
#include <cstdint>
#include <exception>
#include <string>

#include <torch/csrc/Exceptions.h>

#include "python/src/bind.h"
#include "snug/core.h"
#include "snug/state.h"
#include "src/core/other_state.h"

namespace snug::python {
namespace {

namespace py = pybind11;

void set_budget_exceeded(const py::handle& type, const BudgetExceeded& error) {
  const py::object value = type(error.what());
  value.attr("smallest_feasible") = error.smallest_feasible().count();
  PyErr_SetObject(type.ptr(), value.ptr());
}

// A state is put back in destructors, where nothing may be thrown: a signal that comes while Python runs there is
// raised again later.
void restore_other_state(const std::any& state) {
  with_lock([&] {
    const auto restore = [&] { (*std::any_cast<Shared<py::object>>(&state))->attr("put_back")(); };
    try {
      restore();
    } catch (py::error_already_set& error) {
      restore();
      if (error.matches(PyExc_KeyboardInterrupt)) {
        PyErr_SetInterrupt();
      } else {
        error.discard_as_unraisable("snug: putting back what planning has changed");
      }
    }
  });
}

// Of a forward pass, or of a backward pass through a function of Python's: KeyboardInterrupt, SystemExit and the like.
bool is_interrupt(const std::exception& error) {
  const py::gil_scoped_acquire lock;
  if (const auto* of_forward = dynamic_cast<const py::error_already_set*>(&error)) {
    return !of_forward->matches(PyExc_Exception);
  }
  const auto* of_backward = dynamic_cast<const python_error*>(&error);
  return of_backward != nullptr && of_backward->type != nullptr &&
         PyErr_GivenExceptionMatches(of_backward->type, PyExc_Exception) == 0;
}

}  // namespace

void bind_other_state() {
  detail::set_other_state({.capture = []() -> std::any {
                             return with_lock([]() -> std::any {
                               return Shared<py::object>(py::module_::import("snug._other_state").attr("OtherState")());
                             });
                           },
                           .restore = &restore_other_state,
                           .is_interrupt = &is_interrupt});
}

void bind_errors() {
  static py::object config_error, corrupt_file, budget_exceeded, error, out_of_memory;  // the module is never unloaded
  const py::module_ errors = py::module_::import("snug._errors");
  error = errors.attr("Error");
  config_error = errors.attr("ConfigError");
  corrupt_file = errors.attr("CorruptFile");
  budget_exceeded = errors.attr("BudgetExceeded");
  out_of_memory = py::module_::import("torch").attr("OutOfMemoryError");
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const BudgetExceeded& one) {
      set_budget_exceeded(budget_exceeded, one);
    } catch (const ConfigError& one) {
      PyErr_SetString(config_error.ptr(), one.what());
    } catch (const CorruptFile& one) {
      PyErr_SetString(corrupt_file.ptr(), one.what());
    } catch (const Error& one) {
      PyErr_SetString(error.ptr(), one.what());
    } catch (const c10::OutOfMemoryError& one) {
      PyErr_SetString(out_of_memory.ptr(), one.what_without_backtrace());
    } catch (const c10::Error& one) {
      PyErr_SetString(PyExc_RuntimeError, one.what_without_backtrace());
    } catch (python_error& one) {
      one.restore();
    }
  });
}

Bytes bytes_of(const py::object& value) {
  if (value.is_none()) {
    return Bytes::unlimited();
  }
  if (py::isinstance<py::str>(value)) {
    return Bytes::parse(value.cast<std::string>());
  }
  try {
    return Bytes(value.cast<int64_t>());
  } catch (const py::cast_error&) {
    throw ConfigError("bytes: " + py::repr(value).cast<std::string>() +
                      " is no whole number; give one, such as 8 << 30, or a text such as \"8GiB\"");
  }
}

py::object to_python(const StateDict& state) {
  py::dict result;
  for (const StateDict::Entry& entry : state.entries()) {
    result[py::str(entry.name)] = std::visit(
        [](const auto& value) -> py::object {
          if constexpr (std::is_same_v<std::decay_t<decltype(value)>, StateDict>) {
            return to_python(value);
          } else {
            return py::cast(value);
          }
        },
        entry.value);
  }
  return result;
}

StateDict from_python(const py::dict& state) {
  StateDict result;
  for (const auto& [key, value] : state) {
    const auto name = py::str(key).cast<std::string>();
    if (py::isinstance<py::dict>(value)) {
      result.set(name, from_python(py::reinterpret_borrow<py::dict>(value)));
    } else if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value)) {
      result.set(name, from_python(py::dict(py::module_::import("builtins").attr("enumerate")(value))));
    } else if (THPVariable_Check(value.ptr())) {
      result.set(name, value.cast<at::Tensor>());
    } else if (py::isinstance<py::bool_>(value)) {
      result.set(name, value.cast<bool>());
    } else if (py::isinstance<py::int_>(value)) {
      result.set(name, value.cast<int64_t>());
    } else if (py::isinstance<py::float_>(value)) {
      result.set(name, value.cast<double>());
    } else if (py::isinstance<py::str>(value)) {
      result.set(name, value.cast<std::string>());
    } else {
      throw ConfigError("load_state_dict: '" + name + "' is a " +
                        py::type::of(value).attr("__name__").cast<std::string>() + ", which no state of snug has");
    }
  }
  return result;
}

}  // namespace snug::python

PYBIND11_MODULE(_snug, module) {
  module.doc() = "snug's C++ library; use the package snug";
  snug::python::bind_errors();
  snug::python::bind_other_state();
  snug::python::bind_memory(module);
  snug::python::bind_plans(module);
  snug::python::bind_optimizers(module);
  snug::python::bind_stepper(module);
}
