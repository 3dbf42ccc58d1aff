"""auto_checkpoint: a loop of one's own, unmodified, within a number of bytes."""

import logging
import threading
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import _snug
from ._errors import BudgetExceeded, ConfigError
from ._memory import MemoryMeter, live_bytes
from ._plan import plan

Model = TypeVar("Model", bound=torch.nn.Module)

_of_thread = threading.local()  # call: the call of a model that runs in this thread, with its plan or to make one


def auto_checkpoint(model: Model, memory_budget: int | str) -> Model:
    """Plans what each training step of `model` computes again, in a loop that stays as it is.

        model = snug.auto_checkpoint(model, memory_budget="8GB")
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        print(model.auto_checkpoint)        # what was chosen

    memory_budget: most tensor memory of the model's device that may be alive in forward and backward, of whatever kind: weights,
    optimizer state, batch, gradients, activations. A number of bytes, or a text such as "8GB".

    Returns the same model, with hooks that run around its forward(). The loop keeps the loss, backward(), the optimizer, clipping,
    accumulation, autocast and everything else. The attribute auto_checkpoint of the model is an AutoCheckpoint.

    A plan is made by the first call of the model with gradients enabled, and made again by a call
    - with larger tensors, other arguments, or in another mode (train, eval, autocast) than all calls before;
    - with other gradients there already, as in accumulation;
    - with more memory alive, as after the first step, where the optimizer has made its state.
    Planning calls forward() a few times, and backward runs. The same is put back as by snug.plan, and what is not is the program's.

    The loss is the first scalar that forward() returns. Where there is none the program computes the loss outside the model, and that
    cannot be planned. The memory of that part is measured in the first step of each plan, until when it is taken for three times that of
    the model's outputs. One backward pass follows each call: where a loss takes several calls of a model, use snug.plan.

    Raises from the call of the model: BudgetExceeded where no plan fits, whose smallest_feasible is then the smallest memory_budget
    that does; ConfigError as snug.plan does, and for outputs without a tensor that requires a gradient.
    """
    before = vars(model).get("auto_checkpoint")
    if isinstance(before, AutoCheckpoint):
        before.remove()
    model.auto_checkpoint = AutoCheckpoint(model, memory_budget)
    return model


class AutoCheckpoint:
    """What auto_checkpoint() has chosen for a model, as a text for people and as the Plan of the last call of the model. Copies and
    pickles of the model plan anew. The logger "snug" tells each choice at the level INFO."""

    #: Most bytes of live tensor memory.
    memory_budget: int
    #: Of the last call of the model; None before the first.
    plan: _snug.Plan | None

    def __init__(self, model: torch.nn.Module, memory_budget: int | str) -> None:
        self.memory_budget = _snug.bytes_of(memory_budget)
        self.plan = None
        self._plans = {}  # by kind of call, by sizes
        self._meter = None
        self._hooks = (model.register_forward_pre_hook(self._before, with_kwargs=True),
                       model.register_forward_hook(self._after, always_call=True))

    def remove(self) -> None:
        """Takes the hooks away: the model runs as it did before."""
        for hook in self._hooks:
            hook.remove()
        self._stop_meter()

    def __str__(self) -> str:
        return f"memory_budget {_mib(self.memory_budget)}: " + (str(self.plan) if self.plan else "no step was made yet")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "plan": None, "_plans": {}, "_meter": None}

    def _before(self, model, args, kwargs):
        call = getattr(_of_thread, "call", None)
        if call is not None:
            call.depth += call.of is self  # a model that calls itself
            return
        if not torch.is_grad_enabled() or not any(p.requires_grad for p in model.parameters()):
            return
        self._stop_meter()
        _of_thread.call = call = _Call(self)
        try:
            call.planned = self._planned(call, model, args, kwargs)
            call.planned.plan.__enter__()
        except BaseException:
            _of_thread.call = None
            raise

    def _after(self, _, __, outputs):
        call = getattr(_of_thread, "call", None)
        if call is None or call.of is not self:
            return
        if call.depth > 0:
            call.depth -= 1
            return
        _of_thread.call = None
        planned = call.planned
        planned.plan.__exit__()
        self.plan = planned.plan
        if call.sizes != planned.sizes:
            if self.plan.deviation:
                planned.deviating.add(call.sizes)
        elif not planned.is_measured:
            self._measure(planned, outputs)

    def _planned(self, call, model, args, kwargs):
        device = next(p.device for p in model.parameters())
        kind, call.sizes = _kind_and_sizes(model, device, args, kwargs)
        plans, live = self._plans.setdefault(kind, {}), live_bytes(device)
        for planned in plans.values():
            if planned.serves(call.sizes) and live + planned.plan.peak_bytes + planned.outside_bytes <= self.memory_budget:
                return planned
        planned = _Planned(call.sizes, device, plans.get(call.sizes))
        self._make(planned, model, args, kwargs, live)
        plans[call.sizes] = planned
        return planned

    def _make(self, planned, model, args, kwargs, live):
        def loss_of():
            torch.clear_autocast_cache()  # so that weights are cast in each pass, as in each step
            outputs = model.forward(*pytree.tree_map(_leaf, args), **pytree.tree_map(_leaf, kwargs))
            loss, is_own = _loss(outputs)
            if not planned.is_measured:
                planned.outside_bytes = loss.nbytes if is_own else 3 * sum(tensor.nbytes for tensor in _tensors(outputs))
            loss.outputs = outputs  # which the program holds, too, while backward runs
            return loss

        # Planning keeps copies of gradients that are there. A hundredth is left to memory that grows a little from step to step.
        room, beside = self.memory_budget - live, _gradient_bytes(model) + self.memory_budget // 100
        try:
            while planned.plan is None or planned.plan.peak_bytes > room - planned.outside_bytes:  # known better after a pass
                try:
                    planned.plan = plan(loss_of, max(0, room - planned.outside_bytes - beside))
                except BudgetExceeded as error:
                    if not 0 < error.smallest_feasible <= room - planned.outside_bytes:
                        raise
                    planned.plan = plan(loss_of, error.smallest_feasible)
        except BudgetExceeded as error:
            least = error.smallest_feasible
            raised = BudgetExceeded(
                f"auto_checkpoint: memory_budget is {_mib(self.memory_budget)}; {_mib(live)} are alive before forward, the loss outside the "
                f"model takes {_mib(planned.outside_bytes)}, and {error}")
            raised.smallest_feasible = least and least + live + planned.outside_bytes
            raise raised from None
        torch.clear_autocast_cache()
        logging.getLogger("snug").info("auto_checkpoint: %s", planned.plan)

    def _measure(self, planned, outputs):
        """Most bytes from here until the gradient of one of the outputs is there: what the loss outside the model takes."""
        self._meter = meter = MemoryMeter(device=planned.device)
        meter.__enter__()

        def of_outputs(gradient):
            if not planned.is_measured:
                planned.is_measured, planned.outside_bytes = True, meter.report().peak_bytes

        for tensor in _tensors(outputs):
            tensor.register_hook(of_outputs)

    def _stop_meter(self):
        if self._meter is not None:
            self._meter.__exit__()
            self._meter = None


class _Call:
    def __init__(self, of):
        self.of, self.depth, self.planned, self.sizes = of, 0, None, ()


class _Planned:
    def __init__(self, sizes, device, before):
        self.sizes, self.device, self.plan = sizes, device, None
        self.deviating = before.deviating if before else set()  # smaller sizes with other operators
        self.outside_bytes, self.is_measured = (before.outside_bytes, before.is_measured) if before else (0, False)  # of the loss

    def serves(self, sizes):
        """A smaller batch is within the plan of a larger one, unless it takes other operators."""
        return sizes == self.sizes or (sizes not in self.deviating and all(a <= b for a, b in zip(sizes, self.sizes)))


def _kind_and_sizes(model, device, args, kwargs):
    """What must be the same for a plan to serve, and what may be smaller."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    sizes = [size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape]
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    return (structure, model.training, autocast, _gradient_bytes(model), tuple(map(_kind, leaves))), tuple(sizes)


def _gradient_bytes(model):
    return sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


def _kind(leaf):
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.device, leaf.dim(), leaf.requires_grad
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)


def _leaf(value):
    """So that planning runs backward as far as the model's inputs."""
    return value.detach().requires_grad_() if isinstance(value, Tensor) and value.requires_grad else value


def _tensors(outputs):
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _loss(outputs):
    """A scalar for backward, and whether the model has computed it."""
    tensors = _tensors(outputs)
    if not tensors:
        raise ConfigError("auto_checkpoint: the model returns no tensor that requires a gradient, in tuples, lists, dictionaries or what "
                          "else torch.utils._pytree knows; nothing can be planned")
    scalar = next((tensor for tensor in tensors if tensor.dim() == 0), None)
    if scalar is not None:
        return scalar.view_as(scalar), True
    return sum((tensor.real if tensor.is_complex() else tensor).mean() for tensor in tensors), False


def _mib(count):
    return f"{count / 2**20:.1f} MiB"
