"""Plans for the activations of a step that one writes oneself."""

import contextlib
from collections.abc import Callable, Iterator

from torch import Tensor
from torch.nn import Module

from . import _snug
from ._environment import meet_compilers, modules_are_looked_at
from ._errors import BudgetExceeded
from ._other_state import buffers_are_put_back


def plan(loss_of: Callable[[], Tensor], budget: int | str) -> _snug.Plan:
    """The fastest exact way found to run a step's forward and backward within `budget`.

        plan = snug.plan(lambda: loss_of(batch), budget="8GiB")
        print(plan)
        with plan:
            loss = loss_of(batch)
        loss.backward()

    loss_of: takes nothing, returns the loss, a scalar tensor. It is called a few times, and backward runs. After each call these
    are put back: gradients, tensors that were written in place, the buffers of all modules that were replaced, added or
    removed, torch's default generators, `random` and numpy.random. Other threads must not train meanwhile. What else it moves
    on, such as a counter or a generator of its own, is not. Where that changes the loss, ConfigError is raised; it is for
    models of FSDP, too.
    budget: the most bytes that the step may take above the level of memory at the call, new gradients included; a number,
    or a text such as "8GiB".

    Returns a Plan: peak_bytes and seconds are predicted, plain_peak_bytes and plain_seconds are those without a plan. After a
    block, `deviation` names the first operator that was another than planned for, or had larger results ("": none), and
    replayed_operators counts those that ran again. The forward pass belongs into the block, backward behind it.
    Raises BudgetExceeded, whose smallest_feasible is the least budget that was found, and tried.
    """
    with _trials():
        return _snug.plan(loss_of, budget)


def fits(loss_of: Callable[[], Tensor], budget: int | str) -> bool:
    """Whether there is a plan for the step within `budget`. See plan()."""
    try:
        plan(loss_of, budget)
    except BudgetExceeded:
        return False
    return True


def curve(loss_of: Callable[[], Tensor], points: int = 10) -> list[tuple[int, float]]:
    """What the step takes under every budget: a list of (peak in bytes, seconds), plain training first. It runs the plain
    step, which must fit."""
    with _trials():
        return _snug.curve(loss_of, points)


@contextlib.contextmanager
def _trials() -> Iterator[None]:
    """Steps that are no steps of training. Which modules they use cannot be told from a function."""
    meet_compilers()
    modules = _snug.live_instances(Module)  # of the process
    with buffers_are_put_back(modules), modules_are_looked_at(modules):
        yield
