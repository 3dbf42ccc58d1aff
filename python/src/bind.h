#pragma once
// The parts of the module _snug.

#include "python/src/python_callable.h"
#include "snug/core.h"
#include "snug/state.h"

namespace snug::python {

/// What C++ throws becomes an error of snug._errors, or torch.OutOfMemoryError.
void bind_errors();
/// Planning puts back what snug._other_state knows of.
void bind_other_state();
void bind_memory(pybind11::module_& module);
void bind_plans(pybind11::module_& module);
void bind_optimizers(pybind11::module_& module);
void bind_stepper(pybind11::module_& module);

/// "8GiB", or a number of bytes; None: no limit. Throws ConfigError for other texts.
Bytes bytes_of(const pybind11::object& value);

/// Dictionaries within dictionaries, of tensors, numbers and texts. A list or tuple becomes a StateDict with the names
/// 0, 1, ...
pybind11::object to_python(const StateDict& state);
StateDict from_python(const pybind11::dict& state);

}  // namespace snug::python
