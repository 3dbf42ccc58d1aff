"""AdamW8bit: AdamW whose two moments take one byte an element instead of four."""

import torch

from . import _snug
from ._errors import ConfigError


class AdamW8bit(torch.optim.Optimizer):
    """For FP32 parameters on the CPU. Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861).

        optimizer = snug.AdamW8bit(model.parameters(), lr=3e-4)

    Parameters with fewer than `min_elements` elements keep FP32 moments: they are small, and often sensitive. Schedules of
    torch.optim.lr_scheduler work on it. The state dictionary has exp_avg and exp_avg_sq as bytes, and exp_avg_max and
    exp_avg_sq_max with an FP32 number per 256 elements.
    """

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, *, min_elements=4096):
        self._native = None
        self._min_elements = min_elements
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._native = _snug.AdamW8bit(self.param_groups, min_elements)

    def add_param_group(self, param_group):
        if self._native is not None:
            raise ConfigError("AdamW8bit: groups cannot be added later; give all to the constructor")
        super().add_param_group(param_group)

    def step(self, closure=None):
        """Updates every parameter that has a gradient. An error leaves parameters and state as they were."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._native_optimizer().step()
        return loss

    def state_dict(self):
        state = self._native.state_dict().get("state", {})
        return {**super().state_dict(), "state": {int(index): of_one for index, of_one in state.items()}}

    def load_state_dict(self, state_dict):
        """Takes over moments and options. An error leaves the optimizer as it was. Moments that a hook of
        register_load_state_dict_pre_hook changes are not seen: change them before the call."""
        native = {"state": {str(index): of_one for index, of_one in state_dict["state"].items()},
                  "param_groups": state_dict["param_groups"]}
        before, groups = self._native.state_dict(), self.param_groups
        self._native.load_state_dict(native)
        try:
            super().load_state_dict({**state_dict, "state": {}})
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


def native_of(optimizer):
    """What snug's C++ takes for an optimizer of Python's."""
    return optimizer._native if isinstance(optimizer, AdamW8bit) else optimizer
