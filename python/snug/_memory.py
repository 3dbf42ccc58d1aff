"""MemoryMeter, MemoryLimit, and models that are larger than their device."""

from typing import Any

import torch

from . import _snug
from ._errors import ConfigError
from ._optimizers import native_of


class MemoryMeter:
    """The bytes of live tensors, and their peak, exact to the byte on the CPU.

        with snug.MemoryMeter(model, optimizer) as meter:
            train_one_step()
            print(meter.report().peak_bytes)

    model, optimizer: their tensors are counted in kinds of their own. device: "cpu" if it is not given, or that of the
    model's parameters. report() gives live_bytes and peak_bytes, above the level where the meter began, and the kinds at
    the peak: parameters, gradients, optimizer_state, activations, workspace, outputs, before.
    """

    def __init__(self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None,
                 device: torch.device | str | None = None) -> None:
        first = next(model.parameters(), None) if model is not None else None
        self._device = str(device if device is not None else first.device if first is not None else "cpu")
        self._attached = model, native_of(optimizer)
        self._open = []  # a meter for each block
        self._last = None

    def __enter__(self) -> "MemoryMeter":
        self._open.append(_snug.Meter(self._device, *self._attached))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._last = self._open.pop().report()

    def report(self) -> _snug.MemoryReport:
        """Of the innermost block that is open, as of now; after it, as at its end. ConfigError where there was none."""
        if not self._open and self._last is None:
            raise ConfigError("MemoryMeter.report: no block has begun; open one by `with meter:`")
        return self._open[-1].report() if self._open else self._last


class MemoryLimit:
    """A cap on all live tensor memory of a device within a block.

        with snug.MemoryLimit("1GiB"):
            train()    # an allocation beyond it raises torch.OutOfMemoryError

    bytes: a number, or a text such as "1.5GiB". ConfigError if more is taken already.
    """

    def __init__(self, bytes: int | str, device: torch.device | str = "cpu") -> None:
        self._arguments = str(torch.device(device)), bytes
        self._open = []  # a limit for each block

    def __enter__(self) -> "MemoryLimit":
        self._open.append(_snug.Limit(*self._arguments))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.pop()


def live_bytes(device: torch.device | str = "cpu") -> int:
    """Bytes of tensor memory alive on a device now."""
    return _snug.live_bytes(str(torch.device(device)))


def move_with_weights_on_host(model: torch.nn.Module, device: torch.device | str) -> torch.nn.Module:
    """Moves a model from the CPU to a device that has no room for its weights, and returns it.

        model = snug.move_with_weights_on_host(Model(), "cuda")
        optimizer = snug.AdamW(model.parameters())
        stepper = snug.Stepper(model, optimizer, memory="20GiB", offload="")

    Parameters of 64 KiB and more take no memory of the device: their values go to page-locked memory of the host, and come to the device in
    the steps of a Stepper with `offload`, for the operators of the thread of the Stepper. Before the first step an access raises.
    ConfigError if `device` is the CPU, snug.Error if the host has too little memory.
    """
    _snug.move_with_weights_on_host(model, str(torch.device(device)))
    return model
