"""AdamW8bit: AdamW whose two moments take one byte an element instead of four."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from . import _snug
from ._errors import ConfigError


class AdamW8bit(torch.optim.Optimizer):
    """For FP32 parameters on the CPU. Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861).

        optimizer = snug.AdamW8bit(model.parameters(), lr=3e-4)

    Parameters with fewer than `min_elements` elements keep FP32 moments: they are small, and often sensitive. Schedules of
    torch.optim.lr_scheduler work on it. The state dictionary has exp_avg and exp_avg_sq as bytes, and exp_avg_max and
    exp_avg_sq_max with an FP32 number per 256 elements.
    """

    def __init__(self, params: ParamsT, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, *, min_elements: int = 4096) -> None:
        self._native = None
        self._min_elements = min_elements
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._native = _snug.AdamW8bit(self.param_groups, min_elements)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """For the constructor alone: ConfigError after it."""
        if self._native is not None:
            raise ConfigError("AdamW8bit: groups cannot be added later; give all to the constructor")
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
        """Takes over moments and options. An error leaves the optimizer as it was."""
        def take_moments(_, state_dict):
            state = {str(index): of_one for index, of_one in state_dict["state"].items()}
            self._native.load_state_dict({"state": state, "param_groups": state_dict["param_groups"]})
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
        return {**super().__getstate__(), "native": self._native.state_dict(), "min_elements": self._min_elements}

    def __setstate__(self, state):
        native = state.get("native")  # none from load_state_dict
        super().__setstate__({name: value for name, value in state.items() if name not in ("native", "min_elements")})
        if native is not None:
            self._min_elements = state["min_elements"]
            self._native = _snug.AdamW8bit(self.param_groups, self._min_elements)
            self._native.load_state_dict(native)

    def _native_optimizer(self):
        self._native.set_options(self.param_groups)
        return self._native


@contextlib.contextmanager
def _as_hook(handle):
    """Hooks of state_dict() and load_state_dict() hand the moments over, so that a program's own hooks see and change them."""
    try:
        yield
    finally:
        handle.remove()


def native_of(optimizer):
    """What snug's C++ takes for an optimizer of Python's."""
    return optimizer._native if isinstance(optimizer, AdamW8bit) else optimizer
