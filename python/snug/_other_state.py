"""What planning puts back besides the memory of tensors: random numbers that are not torch's, and which tensors are the buffers
of modules."""

import contextlib
import random
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_of_thread = threading.local()  # modules: whose buffers planning puts back


class OtherState:
    """As it is now, for the thread that makes it. C++ makes one before it plans, and calls put_back() after each call of loss_of
    that is none of training's."""

    def __init__(self) -> None:
        self._random = random_state()
        self._buffers = BuffersBefore(getattr(_of_thread, "modules", ()))

    def put_back(self) -> None:
        """May be called again where a signal has interrupted it."""
        set_random_state(self._random)
        self._buffers.put_back()


class BuffersBefore:
    """Which tensors are the registered buffers of `modules`. What stands in these is C++'s to put back."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._before = [(module, buffers, dict(buffers.items()), set(_non_persistent(module)))
                        for module in modules if (buffers := vars(module).get("_buffers")) is not None]

    def put_back(self) -> None:
        """Takes out what was registered since, and puts in what was removed or replaced."""
        for module, buffers, before, non_persistent in self._before:
            if not _same(dict(buffers.items()), before):
                for name in before:
                    vars(module).pop(name, None)  # an attribute that took the name of a buffer that was removed
                _put_back(buffers, before)  # last, as the call may be repeated after a signal
            if _non_persistent(module) != non_persistent:
                _non_persistent(module).clear()
                _non_persistent(module).update(non_persistent)


def _non_persistent(module):
    return vars(module).get("_non_persistent_buffers_set", set())


def _same(now, before):
    return list(now) == list(before) and all(now[name] is before[name] for name in before)


# Those of a module of TorchScript are no dictionary, but always have the same names.
def _put_back(buffers, before):
    if list(buffers.keys()) != list(before):
        buffers.clear()
        buffers.update(before)
    for name, buffer in before.items():
        buffers[name] = buffer


@contextlib.contextmanager
def buffers_are_put_back(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """By what this thread plans within the block."""
    before = getattr(_of_thread, "modules", ())
    _of_thread.modules = list(modules)
    try:
        yield
    finally:
        _of_thread.modules = before


def random_state() -> tuple[Any, Any]:
    """Of Python's `random`, and of numpy.random, if that is loaded."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), numpy and numpy.get_state()


def set_random_state(state: tuple[Any, Any]) -> None:
    """Puts back what random_state() has returned."""
    of_random, of_numpy = state
    random.setstate(of_random)
    if of_numpy:
        sys.modules["numpy.random"].set_state(of_numpy)
