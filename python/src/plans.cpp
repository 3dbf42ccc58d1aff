#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "python/src/bind.h"
#include "snug/core.h"
#include "snug/plan.h"
#include "src/memory/checked_function.h"
#include "src/planner/curve.h"
#include "src/remat/profile_step.h"

namespace snug::python {
namespace {

namespace py = pybind11;

std::function<at::Tensor()> forward_and_loss(py::function function) {
  return [function = Shared<py::function>(std::move(function))] {
    return with_lock([&] {
      const py::object loss = (*function)();
      if (!THPVariable_Check(loss.ptr())) {
        throw ConfigError("snug.plan: the function returned " +
                          py::type::of(loss).attr("__name__").cast<std::string>() +
                          "; let it return the loss, a tensor");
      }
      return loss.cast<at::Tensor>();
    });
  };
}

// A plan, and the forward passes that run under it, on any thread. Its members are used with the lock.
class Plan {
 public:
  explicit Plan(ActivationPlan plan) : plan_(std::move(plan)) {}

  const ActivationPlan& activations() const { return plan_; }
  const std::string& deviation() const { return deviation_; }
  int64_t replayed_operators() const { return replayed_ ? replayed_->load() : 0; }

  void enter() { open_[std::this_thread::get_id()].push_back(std::make_unique<Rematerialize>(plan_)); }
  void exit() {
    auto& open = open_[std::this_thread::get_id()];
    if (open.empty()) {
      throw ConfigError("Plan: a block ended that did not begin on this thread");
    }
    std::unique_ptr<Rematerialize> scope = std::move(open.back());
    open.pop_back();
    deviation_ = scope->deviation();
    replayed_ = scope->replayed_operators();
    const py::gil_scoped_release no_lock;
    scope.reset();
  }

 private:
  ActivationPlan plan_;
  std::map<std::thread::id, std::vector<std::unique_ptr<Rematerialize>>> open_;
  std::string deviation_;
  std::shared_ptr<const std::atomic<int64_t>> replayed_;
};

// The backward pass of a Function of Python's: apply(node, *gradients).
py::object run_checked(const py::function& apply, const py::object& node, const py::args& gradients) {
  const detail::CheckedFunction check;
  py::object returned = apply(node, *gradients);
  if (check.is_right_as_it_is()) {
    return returned;
  }
  const auto own = [&](const py::handle& one) {
    return THPVariable_Check(one.ptr()) ? py::cast(check.own(one.cast<at::Tensor>()))
                                        : py::reinterpret_borrow<py::object>(one);
  };
  if (!py::isinstance<py::tuple>(returned)) {
    return own(returned);
  }
  py::tuple all(py::len(returned));
  for (size_t i = 0; i < all.size(); ++i) {
    all[i] = own(returned.cast<py::tuple>()[i]);
  }
  return all;
}

std::shared_ptr<Plan> make_plan(py::function loss_of, const py::object& budget) {
  const Bytes bytes = bytes_of(budget);
  const auto forward = forward_and_loss(std::move(loss_of));
  const py::gil_scoped_release no_lock;
  return std::make_shared<Plan>(plan_activations(forward, bytes));
}

std::vector<std::pair<int64_t, double>> curve(py::function loss_of, int points) {
  const auto forward = forward_and_loss(std::move(loss_of));
  const py::gil_scoped_release no_lock;
  std::vector<std::pair<int64_t, double>> result;
  const plan::Profile profile = detail::profile_step(forward);
  const plan::Simulator simulator(profile);
  for (const plan::Solution& one : plan::curve(simulator, {.points = points}).points) {
    result.emplace_back(one.peak_bytes, one.seconds);
  }
  return result;
}

// The objects of the process whose class is `kind` or derives from `kind`.
py::list live_instances(const py::type& kind) {
  const py::list all = py::module_::import("gc").attr("get_objects")();
  py::list result;
  for (const py::handle one : all) {
    if (PyObject_TypeCheck(one.ptr(), reinterpret_cast<PyTypeObject*>(kind.ptr())) != 0) {
      result.append(one);
    }
  }
  return result;
}

}  // namespace

void bind_plans(py::module_& module) {
  py::class_<Plan, std::shared_ptr<Plan>>(module, "Plan")
      .def("__enter__",
           [](const std::shared_ptr<Plan>& plan) {
             py::module_::import("snug._environment").attr("meet_compilers")();
             plan->enter();
             return plan;
           })
      .def("__exit__", [](Plan& plan, const py::args& /*exception*/) { plan.exit(); })
      .def("__str__", [](const Plan& plan) { return plan.activations().explain(); })
      .def_property_readonly("peak_bytes", [](const Plan& plan) { return plan.activations().predicted_peak_bytes; })
      .def_property_readonly("seconds", [](const Plan& plan) { return plan.activations().predicted_seconds; })
      .def_property_readonly("plain_peak_bytes", [](const Plan& plan) { return plan.activations().plain_peak_bytes; })
      .def_property_readonly("plain_seconds", [](const Plan& plan) { return plan.activations().plain_seconds; })
      .def_property_readonly("deviation", &Plan::deviation)
      .def_property_readonly("replayed_operators", &Plan::replayed_operators)
      .def("to_json", [](const Plan& plan) { return plan.activations().to_json(); })
      .def_static("from_json",
                  [](const std::string& text) { return std::make_shared<Plan>(ActivationPlan::from_json(text)); });
  module.def("plan", &make_plan);
  module.def("curve", &curve);
  module.def("run_checked", &run_checked);
  module.def("live_instances", &live_instances);
}

}  // namespace snug::python
