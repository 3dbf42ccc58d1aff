"""AdamW and AdamW8bit: optimizers of snug's, whose state may be outside of the memory of the parameters' device."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from . import _snug
from ._errors import ConfigError


@dataclasses.dataclass(frozen=True)
class StateOnDevice:
    """The memory of the parameters' device, where each optimizer's state is at first."""


@dataclasses.dataclass(frozen=True)
class StateOnHost:
    """The host's memory, for the state of parameters on another device. The CPU makes the updates.

    window: page-locked memory through which gradients and parameters pass, a number of bytes or a text such as "16MiB".
    """

    window: int | str = "16MiB"


@dataclasses.dataclass(frozen=True)
class StateFile:
    """A file without a name in `directory`, a folder on a disk. window: memory through which an update streams the state."""

    directory: str | os.PathLike[str]
    window: int | str = "24MiB"


StatePlacement = StateOnDevice | StateOnHost | StateFile


class _Optimizer(torch.optim.Optimizer):
    """An optimizer of snug's C++, `_native`, with the interface of torch.optim. `_make`: the class of `_native`."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any], **arguments: Any) -> None:
        self._native = None
        self._arguments = arguments
        super().__init__(params, defaults)
        self._native = self._make(self.param_groups, **arguments)

    def keep_state_in(self, place: StatePlacement) -> None:
        """Moves the state, and keeps it in `place` from now on: StateOnDevice(), StateOnHost() or StateFile(directory). The updates have
        the bits of the CPU wherever the CPU makes them. ConfigError where the state cannot be there; an error leaves all as it was."""
        if not isinstance(place, StatePlacement):
            raise ConfigError(f"{type(self).__name__}.keep_state_in: {place!r} is no place; give StateOnDevice(), StateOnHost() or "
                              "StateFile(directory)")
        directory = getattr(place, "directory", None)
        if not self._native.keep_state_in(getattr(place, "window", None), None if directory is None else os.fspath(directory)):
            raise ConfigError(f"{type(self).__name__}.keep_state_in: the state cannot be in {place!r}: updates of parameters on a device are "
                              "made on the CPU; give StateOnHost() or StateFile(directory)")

    @property
    def state_placement(self) -> StatePlacement:
        """Where the state is: as keep_state_in() or the plan of a Stepper put it."""
        window, directory = self._native.state_placement()
        return StateOnDevice() if window is None else StateOnHost(window) if directory is None else StateFile(directory, window)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """For the constructor alone: ConfigError after it."""
        if self._native is not None:
            raise ConfigError(f"{type(self).__name__}: groups cannot be added later; give all to the constructor")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient. An error leaves parameters and state as they were."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._native_optimizer().step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim's: "state" by the parameters' numbers, and "param_groups"."""
        def with_moments(_, state_dict):
            state = self._native.state_dict().get("state", {})
            return {**state_dict, "state": {int(index): of_one for index, of_one in state.items()}}

        with _as_hook(self.register_state_dict_post_hook(with_moments, prepend=True)):
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over moments and options, also those of torch.optim.AdamW for an AdamW. An error leaves the optimizer as it was."""
        def take_moments(_, state_dict):
            state = {str(index): of_one for index, of_one in state_dict["state"].items()}
            groups = [{name: value for name, value in group.items() if value is not None} for group in state_dict["param_groups"]]
            self._native.load_state_dict({"state": state, "param_groups": groups})
            return {**state_dict, "state": {}}

        before, groups = self._native.state_dict(), self.param_groups
        try:
            with _as_hook(self.register_load_state_dict_pre_hook(take_moments)):
                super().load_state_dict(state_dict)
        except BaseException:
            self._native.load_state_dict(before)
            self.param_groups = groups
            raise

    def __getstate__(self):  # for copies and pickles
        own = {"native": self._native.state_dict(), "place": self.state_placement, "arguments": self._arguments}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state):
        own = {name: state.pop(name) for name in ("native", "place", "arguments") if name in state}  # none from load_state_dict
        super().__setstate__(state)
        if own:
            self._arguments = own["arguments"]
            self._native = self._make(self.param_groups, **self._arguments)
            self.keep_state_in(own["place"])
            self._native.load_state_dict(own["native"])

    def _native_optimizer(self):
        self._native.set_options(self.param_groups)
        return self._native


class AdamW(_Optimizer):
    """AdamW with the bits of torch.optim.AdamW(fused=True). For FP32 and FP64 parameters.

        optimizer = snug.AdamW(model.parameters(), lr=3e-4)

    Unlike the state of torch's, its state may be in a file or, for parameters on a device, in the host's memory (keep_state_in): with
    `offload` a Stepper may put state, gradients and weights there.
    """

    _make = _snug.AdamW

    def __init__(self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})


class AdamW8bit(_Optimizer):
    """AdamW whose two moments take one byte an element instead of four. For FP32 parameters. The CPU makes the updates: for parameters on a
    device call keep_state_in(StateOnHost()), or give a Stepper `offload`. Dettmers et al. 2022, "8-bit Optimizers via Block-wise
    Quantization" (arXiv:2110.02861).

        optimizer = snug.AdamW8bit(model.parameters(), lr=3e-4)

    Parameters with fewer than `min_elements` elements keep FP32 moments: they are small, and often sensitive. Schedules of
    torch.optim.lr_scheduler work on it. The state dictionary has exp_avg and exp_avg_sq as bytes, and exp_avg_max and
    exp_avg_sq_max with an FP32 number per 256 elements.
    """

    _make = _snug.AdamW8bit

    def __init__(self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, *, min_elements: int = 4096) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, min_elements=min_elements)


@contextlib.contextmanager
def _as_hook(handle):
    """Hooks of state_dict() and load_state_dict() hand the moments over, so that a program's own hooks see and change them."""
    try:
        yield
    finally:
        handle.remove()


def is_native(optimizer):
    """Whether C++ makes its updates."""
    return isinstance(optimizer, _Optimizer)


def native_of(optimizer):
    """What snug's C++ takes for an optimizer of Python's."""
    return optimizer._native if is_native(optimizer) else optimizer
