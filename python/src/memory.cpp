#include "snug/memory.h"

#include <memory>
#include <optional>
#include <string>

#include "python/src/bind.h"
#include "python/src/python_model.h"
#include "src/memory/peak_watch.h"

namespace snug::python {
namespace {

namespace py = pybind11;

// A meter keeps references to what is attached, so these live as long as it does.
struct Meter {
  std::shared_ptr<PythonModule> model;
  std::shared_ptr<PythonOptimizer> optimizer;
  py::object own_optimizer;
  MemoryMeter meter;

  Meter(const std::string& device, const py::object& of_model, const py::object& of_optimizer)
      : meter(c10::Device(device)) {
    if (!of_model.is_none()) {
      meter.attach(*(model = std::make_shared<PythonModule>(of_model)));
    }
    if (py::isinstance<torch::optim::Optimizer>(of_optimizer)) {
      own_optimizer = of_optimizer;
      meter.attach(of_optimizer.cast<torch::optim::Optimizer&>());
    } else if (!of_optimizer.is_none()) {
      meter.attach(*(optimizer = std::make_shared<PythonOptimizer>(of_optimizer)));
    }
  }
};

MemoryMeter::Report report(const Meter& meter) {
  const py::gil_scoped_release no_lock;
  return meter.meter.report();
}

}  // namespace

void bind_memory(py::module_& module) {
  py::class_<MemoryMeter::Report>(module, "MemoryReport")
      .def_readonly("live_bytes", &MemoryMeter::Report::live_bytes)
      .def_readonly("peak_bytes", &MemoryMeter::Report::peak_bytes)
      .def_readonly("parameters", &MemoryMeter::Report::parameters)
      .def_readonly("gradients", &MemoryMeter::Report::gradients)
      .def_readonly("optimizer_state", &MemoryMeter::Report::optimizer_state)
      .def_readonly("activations", &MemoryMeter::Report::activations)
      .def_readonly("workspace", &MemoryMeter::Report::workspace)
      .def_readonly("outputs", &MemoryMeter::Report::outputs)
      .def_readonly("before", &MemoryMeter::Report::before);
  py::class_<Meter>(module, "Meter")
      .def(py::init<const std::string&, const py::object&, const py::object&>())
      .def("report", &report);
  py::class_<MemoryLimit>(module, "Limit").def(py::init([](const std::string& device, const py::object& bytes) {
    return std::make_unique<MemoryLimit>(c10::Device(device), bytes_of(bytes));
  }));
  py::class_<detail::PeakWatch>(module, "PeakWatch")
      .def(py::init([](const std::string& device) { return std::make_unique<detail::PeakWatch>(c10::Device(device)); }))
      .def("peak", &detail::PeakWatch::peak);
  module.def("bytes_of", [](const py::object& value) { return bytes_of(value).count(); });
  module.def("move_with_weights_on_host", [](const py::object& model, const std::string& device) {
    PythonModule tensors(model);
    move_with_weights_on_host(tensors, c10::Device(device));
  });
  module.def("live_bytes", [](const std::string& device) { return live_bytes(c10::Device(device)).count(); });
}

}  // namespace snug::python
