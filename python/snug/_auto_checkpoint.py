"""auto_checkpoint: a loop of one's own, unmodified, within a number of bytes."""

import logging
import threading
import warnings
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from . import _snug
from ._errors import BudgetExceeded, ConfigError
from ._memory import live_bytes
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
    - with more memory alive: as after the first step, where the optimizer has made its state, or in accumulation, with gradients there.
    Planning calls forward() a few times, and backward runs. Near the least plan there is, planning takes up to twice as much as it.
    The same is put back as by snug.plan, and what is not is the program's.

    The loss is the first scalar that forward() returns. Where there is none the program computes the loss outside the model, and that
    cannot be planned: the memory that it takes is measured in the first step, which runs under the plan that takes the least.
    One backward pass follows each call: where a loss takes several calls of a model, use snug.plan.

    A step that runs other operators than planned keeps what follows, above the budget if need be: a UserWarning tells.
    Raises from the call of the model: BudgetExceeded where no plan fits, whose smallest_feasible is the memory_budget
    that this step would need; ConfigError as snug.plan does, and for outputs without a tensor that requires a gradient.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"auto_checkpoint: a {type(model).__name__} is no torch.nn.Module; give the model that the loop calls")
    planned = model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model  # planning exchanges nothing
    before = vars(planned).get("auto_checkpoint")
    if isinstance(before, AutoCheckpoint):
        before.remove()
    model.auto_checkpoint = planned.auto_checkpoint = AutoCheckpoint(planned, memory_budget)
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
        self._outside = {}  # by kind of call and sizes: bytes that the loss outside the model takes
        self._hooks = (model.register_forward_pre_hook(self._before, with_kwargs=True),
                       model.register_forward_hook(self._after, always_call=True))

    def remove(self) -> None:
        """Takes the hooks away: the model runs as it did before."""
        for hook in self._hooks:
            hook.remove()

    def __str__(self) -> str:
        return f"memory_budget {_mib(self.memory_budget)}: " + (str(self.plan) if self.plan else "no step was made yet")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "plan": None, "_plans": {}, "_outside": {}}

    @torch._disable_dynamo  # the hooks; what they run around may be compiled
    def _before(self, model, args, kwargs):
        call = getattr(_of_thread, "call", None)
        if call is not None:
            call.depth += call.of is self  # a model that calls itself
            return
        if not torch.is_grad_enabled() or not any(p.requires_grad for p in model.parameters()):
            return
        torch.clear_autocast_cache()  # which holds the casts of calls before; every call is planned to cast weights
        _of_thread.call = call = _Call(self, model, args, kwargs)
        try:
            call.planned = self._planned(call)
            call.planned.plan.__enter__()
        except BaseException:
            _of_thread.call = None
            raise

    @torch._disable_dynamo
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
        if planned.sizes == call.sizes:
            self._measure(call, outputs)
            if self.plan.deviation:
                warnings.warn("auto_checkpoint: the step runs other operators than were planned for "
                              f"({self.plan.deviation}), and everything from there on is kept; torch.compile around a planned model does that: plan what torch.compile returns instead")
        elif self.plan.deviation:
            planned.deviating.add(call.sizes)

    def _planned(self, call):
        plans = self._plans.setdefault(call.kind, {})
        for planned in plans.values():
            outside = self._outside.get((call.kind, planned.sizes))
            if planned.serves(call.sizes) and planned.is_careful == (outside is None):
                new_gradients = max(0, planned.gradients - call.gradients)  # that were there when it was planned
                if call.live + new_gradients + planned.plan.peak_bytes + (outside or 0) <= self.memory_budget:
                    return planned
        before = plans.get(call.sizes)
        plans[call.sizes] = planned = self._made(call, before.deviating if before else set())
        return planned

    def _made(self, call, deviating):
        # Planning keeps copies of gradients that are there. A hundredth is left to memory that grows a little from step to step.
        outside = self._outside.get((call.kind, call.sizes))
        room = self.memory_budget - call.live - (outside or 0)
        budget, is_careful = max(0, room - call.gradients - self.memory_budget // 100), False

        def loss_of():
            outputs = call.model.forward(*pytree.tree_map(_leaf, call.args), **pytree.tree_map(_leaf, call.kwargs))
            loss, is_own = _loss(outputs)
            if outside is None and not is_own and not is_careful:
                raise _LossIsOutside
            loss.outputs = outputs  # which the program holds, too, while backward runs
            return loss

        def made():
            try:
                return plan(loss_of, budget)
            except BudgetExceeded as error:
                least = error.smallest_feasible
                if 0 < least <= room:
                    return plan(loss_of, least)
                raised = BudgetExceeded(f"auto_checkpoint: memory_budget is {_mib(self.memory_budget)}; {_mib(call.live)} are alive before "
                                        f"forward, the loss outside the model takes {_mib(outside or 0)}, and {error}")
                raised.smallest_feasible = least and least + call.live + (outside or 0)
                raise raised from None

        try:
            found = made()
        except _LossIsOutside:
            budget, is_careful = 0, True
            found = made()
        if outside is None and not is_careful:
            self._outside[call.kind, call.sizes] = 0
        logging.getLogger("snug").info("auto_checkpoint: %s", found)
        return _Planned(call, found, is_careful, deviating)

    def _measure(self, call, outputs):
        """Most bytes from here until the gradient of one of the outputs is there: what the loss outside the model takes."""
        key = call.kind, call.sizes
        if key in self._outside:
            return
        watch, level = _snug.PeakWatch(str(call.device)), live_bytes(call.device)

        def of_outputs(_):
            if key not in self._outside:
                self._outside[key] = watch.peak() - level

        for tensor in _tensors(outputs):
            tensor.register_hook(of_outputs)


class _LossIsOutside(Exception):
    """What the loss takes is not known yet."""


class _Call:
    def __init__(self, of, model, args, kwargs):
        self.of, self.model, self.args, self.kwargs = of, model, args, kwargs
        self.device = next(p.device for p in model.parameters())
        self.live, self.gradients = live_bytes(self.device), sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        self.kind, self.sizes = _kind_and_sizes(model, self.device, args, kwargs)
        self.depth, self.planned = 0, None


class _Planned:
    """is_careful: takes the least, since what the loss takes is not known."""

    def __init__(self, call, plan_of_it, is_careful, deviating):
        self.sizes, self.gradients, self.plan = call.sizes, call.gradients, plan_of_it
        self.is_careful, self.deviating = is_careful, deviating

    def serves(self, sizes):
        """A smaller batch is within the plan of a larger one, unless it takes other operators."""
        return sizes == self.sizes or (sizes not in self.deviating and all(a <= b for a, b in zip(sizes, self.sizes)))


def _kind_and_sizes(model, device, args, kwargs):
    """What must be the same for a plan to serve, and what may be smaller."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    sizes = [size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape]
    autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
    return (structure, model.training, autocast, tuple(map(_kind, leaves))), tuple(sizes)


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
