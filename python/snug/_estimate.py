"""estimate_memory: what training will take, before it begins."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from . import _snug
from ._first_step import FirstStep
from ._memory import live_bytes
from ._optimizers import is_native, native_of
from ._plan import curve


def estimate_memory(loss_of: Callable[[], Tensor], optimizer: torch.optim.Optimizer | None = None) -> "MemoryEstimate":
    """What training takes: forward and backward of the loss, and the state that the optimizer will make in its first step.

        estimate = snug.estimate_memory(lambda: F.cross_entropy(model(x), y), optimizer)
        print(estimate)
        estimate.fits("8GB")                   # the loop as it is
        estimate.fits("8GB", planned=True)     # with snug.auto_checkpoint, snug.plan or a snug.Stepper

    loss_of: as for snug.plan; it is run in full, which must fit, and what it changes is put back. optimizer: its update is not made. Call it
    without gradients, as at the beginning of a step. Its other allocations in an update are not counted: they come when the
    activations are gone.
    """
    steps, state = curve(loss_of, 2), 0
    groups = optimizer.param_groups if optimizer is not None else []
    parameters = [p for group in groups for p in group["params"] if p.requires_grad]
    if is_native(optimizer):
        state = native_of(optimizer).state_bytes_to_come()
    elif optimizer is not None:
        with torch.random.fork_rng(devices=[]):
            state = FirstStep(optimizer).state_bytes(parameters)
    device = parameters[0].device if parameters else "cpu"
    return MemoryEstimate(live_bytes(device), state, steps[0][0], steps[-1][0])


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of tensors, which are alive together at the peak of a step."""

    #: Alive at the call of estimate_memory(): weights, the batch, and whatever else.
    live_bytes: int
    #: State that the optimizer has yet to make.
    optimizer_bytes: int
    #: Of forward and backward with everything kept: activations and gradients.
    step_bytes: int
    #: Of forward and backward under the plan that takes the least.
    least_step_bytes: int

    @property
    def total_bytes(self) -> int:
        """The peak of the loop as it is."""
        return self.live_bytes + self.optimizer_bytes + self.step_bytes

    @property
    def least_bytes(self) -> int:
        """The peak under the plan that takes the least."""
        return self.live_bytes + self.optimizer_bytes + self.least_step_bytes

    def fits(self, budget: int | str, *, planned: bool = False) -> bool:
        """Whether the loop as it is stays within `budget`, a number of bytes or a text such as "8GB"; planned: whether a plan does."""
        return (self.least_bytes if planned else self.total_bytes) <= _snug.bytes_of(budget)

    def __str__(self) -> str:
        now, state, step, total, least = (f"{count / 2**20:.1f} MiB" for count in (
            self.live_bytes, self.optimizer_bytes, self.step_bytes, self.total_bytes, self.least_bytes))
        return f"{total}: {now} alive now, {state} optimizer state to come, {step} forward and backward; {least} with a plan"
