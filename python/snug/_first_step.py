"""What an optimizer allocates in its first step, before it makes it."""

import collections
import copy
import inspect
import math
from collections.abc import Iterable

import torch

from ._memory import live_bytes
from ._other_state import random_state, set_random_state

#: Sizes of a small parameter, all different, so that a state's sizes tell which of the parameter's they are.
_SIZES = (2, 3, 5, 7, 11, 13, 17)


class FirstStep:
    """An optimizer makes its state in the first step for a parameter. What it will make is read from a first step of a copy of
    the optimizer on small parameters: no name of a class is known here."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {}  # by kind of parameter: see _try
        self._blocks = {}  # by device

    def state_bytes(self, parameters: Iterable[torch.Tensor]) -> int:
        """The bytes of state to come for those `parameters` that have none yet. 0 for those whose copy could not step."""
        wanted = {id(parameter) for parameter in parameters}
        state = self._optimizer.state
        return sum(self._state_bytes_of(parameter, index) for index, group in enumerate(self._optimizer.param_groups)
                   for parameter in group["params"] if id(parameter) in wanted and parameter not in state)

    def _state_bytes_of(self, parameter, index):
        kind = index, _kind_of(parameter)
        if kind not in self._state:
            self._state |= _try(self._optimizer)
        sizes, block = dict(zip(_SIZES, parameter.shape)), self._block(parameter.device)
        counts = (itemsize * (parameter.numel() if is_whole else math.prod(sizes.get(size, size) for size in shape))
                  for itemsize, is_whole, shape in self._state.get(kind, ()))
        return sum(math.ceil(count / block) * block for count in counts)

    def _block(self, device):
        """What the device's allocator gives for one byte: it gives multiples of that."""
        if device.type == "cpu":
            return 1
        if device not in self._blocks:
            before, one = live_bytes(device), torch.empty(1, dtype=torch.uint8, device=device)
            self._blocks[device] = live_bytes(device) - before
        return self._blocks[device]


def _kind_of(parameter):
    return parameter.dtype, parameter.device, tuple(size == 1 for size in parameter.shape)


def _small(parameter):
    ones = _kind_of(parameter)[2]
    small = torch.ones([1 if is_one else size for is_one, size in zip(ones, _SIZES)], dtype=parameter.dtype, device=parameter.device)
    small.grad = torch.ones_like(small)
    return small


def _try(optimizer):
    """The state that a step makes for each kind of parameter in a group: the size of an element, whether there are as many as in
    the parameter, and the shape; of what is on the parameter's device. Nothing where the step fails."""
    small, memo, random_before = {}, {id(optimizer.state): collections.defaultdict(dict)}, random_state()
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if len(parameter.shape) <= len(_SIZES):
                memo[id(parameter)] = small.setdefault((index, _kind_of(parameter)), _small(parameter))
    try:
        twin = object.__new__(type(optimizer))
        memo[id(optimizer)] = twin
        vars(twin).update(copy.deepcopy(vars(optimizer), memo))
        for index, group in enumerate(twin.param_groups):
            group["params"] = [one for (of_group, _), one in small.items() if of_group == index]
        with torch.no_grad():
            inspect.unwrap(type(twin).step)(twin)  # without the hooks around it
    except Exception:
        return dict.fromkeys(small, ())
    finally:
        set_random_state(random_before)
    return {kind: [(value.element_size(), value.numel() == one.numel(), tuple(value.shape))
                   for value in twin.state.get(one, {}).values() if isinstance(value, torch.Tensor) and value.device == one.device]
            for kind, one in small.items()}
