from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

_T = TypeVar("_T")

class Plan:
    """How one forward and backward pass runs: what is kept, and what is computed again. A context for forward passes."""

    peak_bytes: int
    """Predicted, above the level before the step; gradients included."""
    seconds: float
    plain_peak_bytes: int
    """Without a plan."""
    plain_seconds: float
    deviation: str
    """The first operator of the last pass that was another than planned for; "" where there was none."""
    replayed_operators: int
    """Of the last pass."""
    def __enter__(self) -> Plan: ...
    def __exit__(self, *exception: Any) -> None: ...
    def to_json(self) -> str: ...
    @staticmethod
    def from_json(text: str) -> Plan: ...

class Loss:
    """A loss and the number of items that it was taken over, so that micro-batches add up exactly."""

    @staticmethod
    def sum(sum: Tensor, count: int | Tensor) -> Loss: ...
    @staticmethod
    def mean(mean: Tensor, count: int) -> Loss: ...
    @staticmethod
    def whole(loss: Tensor) -> Loss: ...

class StepResult:
    loss: float
    """Mean over all items of the batch."""
    stepped: bool
    """Whether parameters were updated: not so where a gradient was not finite under loss scaling."""
    grad_norm: float
    """Of all gradients, before clipping."""
    scale: float
    micro_batches: int
    items: int
    peak_bytes: int
    """Most tensor memory alive at once, what was there before included."""
    activation_peak_bytes: int
    seconds: float
    step_downs: int
    """How often the step ran out of memory, and was made again with less."""
    plan_deviation: str

class MemoryReport:
    live_bytes: int
    peak_bytes: int
    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    workspace: int
    outputs: int
    before: int

class Meter:
    def __init__(self, device: str, model: Any, optimizer: Any) -> None: ...
    def report(self) -> MemoryReport: ...

class Limit:
    def __init__(self, device: str, bytes: int | str) -> None: ...

class PeakWatch:
    """Most bytes alive at once since it was made. It may be dropped on any thread, and leaves torch's profiler alone."""

    def __init__(self, device: str) -> None: ...
    def peak(self) -> int: ...

class Optimizer: ...

class FusedOptimizer(Optimizer):
    def set_options(self, param_groups: list[dict[str, Any]]) -> None: ...
    def keep_state_in(self, window: int | str | None, directory: str | None) -> bool: ...
    def state_placement(self) -> tuple[int | None, str | None]: ...
    def step(self) -> None: ...
    def state_bytes_to_come(self) -> int: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...

class AdamW(FusedOptimizer):
    def __init__(self, param_groups: list[dict[str, Any]]) -> None: ...

class AdamW8bit(FusedOptimizer):
    def __init__(self, param_groups: list[dict[str, Any]], min_elements: int) -> None: ...

class Stepper:
    def __init__(self, model: Any, optimizer: Any, memory: int | str | None, micro_batch: int, precision: str, clip_norm: float,
                 split_batch_norm: bool, offload: str | None, plan_folder: str, plan: bool) -> None: ...
    def step(self, batch: Sequence[Tensor], loss_of: Callable[..., Tensor | Loss]) -> StepResult: ...
    def plan(self) -> str: ...

def plan(loss_of: Callable[[], Tensor], budget: int | str) -> Plan: ...
def curve(loss_of: Callable[[], Tensor], points: int) -> list[tuple[int, float]]: ...
def run_checked(apply: Callable[..., Any], node: Any, *gradients: Any) -> Any: ...
def live_instances(kind: type[_T]) -> list[_T]: ...
def bytes_of(value: int | str) -> int: ...
def live_bytes(device: str) -> int: ...
def move_with_weights_on_host(model: Any, device: str) -> None: ...
