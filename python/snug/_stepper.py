"""Stepper: one training step within a number of bytes."""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import _snug
from ._environment import meet_compilers, refuse_sharded_model, warn_of_own_checkpoints
from ._errors import ConfigError
from ._optimizers import is_native, native_of
from ._other_state import buffers_are_put_back


Batch = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]


class Stepper:
    """One training step: it cuts the batch into micro-batches, and chooses what is computed again, so that the step is the
    fastest one within `memory`.

        stepper = snug.Stepper(model, optimizer, memory="8GiB", clip_norm=1.0)
        for x, y in loader:
            result = stepper.step((x, y), lambda x, y: F.cross_entropy(model(x), y))
            print(result.loss)

    model: a torch.nn.Module, unmodified. optimizer: a torch.optim.Optimizer whose step() needs no closure; snug.AdamW and snug.AdamW8bit are
    the ones whose state may leave memory.
    memory: most tensor memory that may be alive during a step, of whatever kind: model, optimizer, batch, gradients,
    activations. A number of bytes, a text such as "8GiB", or None: no budget. What cannot be kept is BudgetExceeded.
    An update of the optimizer is never stopped halfway: where it takes more than its state, which is known before, and a
    workspace that is estimated, it goes above `memory`, and StepResult.peak_bytes tells.
    micro_batch: items at a time; 0: the whole batch, or with `memory` as many as is fastest.
    precision: what forward computes in: "float32", "bfloat16", "float16" (with loss scaling) or "auto".
    clip_norm: largest norm of all gradients together; 0: no clipping.
    split_batch_norm: whether a batch may be cut though the model normalises by its statistics.
    offload: a folder on a disk that activations may go to meanwhile; for a model on a device "", its host's memory. With snug.AdamW or
    snug.AdamW8bit the optimizer's state, weights and gradients go there, too, if nothing fits otherwise.
    plan_folder: a folder that keeps plans, so that the next run plans nothing.
    plan: False: `memory` is a limit only, and everything is as the other options have it.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, memory: int | str | None = None, *,
                 micro_batch: int = 0, precision: str = "float32", clip_norm: float = 0.0, split_batch_norm: bool = False,
                 offload: str | os.PathLike[str] | None = None, plan_folder: str | os.PathLike[str] = "",
                 plan: bool = True) -> None:
        meet_compilers()
        _refuse_closures(optimizer)
        self._model, self._optimizer = model, optimizer
        self._plans = plan and memory is not None
        if self._plans:
            refuse_sharded_model(model)
            warn_of_own_checkpoints(model.modules())
        self._groups = _groups(optimizer)
        self._stepper = _snug.Stepper(model, native_of(optimizer), memory, micro_batch, precision, clip_norm, split_batch_norm,
                                      None if offload is None else str(offload), str(plan_folder), plan)

    def step(self, batch: Batch, loss_of: Callable[..., torch.Tensor | _snug.Loss]) -> _snug.StepResult:
        """One optimizer step over `batch`: a tensor, a tuple or list of tensors, or a dictionary of them, with one size along
        dimension 0. Gradients are set to zero first, and backward is called here.

        loss_of(*tensors), or loss_of(**tensors) for a dictionary, gets a part of the batch. It returns the mean of its items'
        losses, or a snug.Loss: Loss.sum(sum, count), Loss.mean(mean, count), Loss.whole(loss) where the batch must not be cut.
        With `memory` it is called some more times in the first step for a shape of batch, to plan: see snug.plan for what is put
        back, and ConfigError. Of buffers that are replaced, added or removed those of the model are put back, and no others.

        Returns a StepResult: loss, stepped, grad_norm, scale, micro_batches, items, peak_bytes, seconds ... A step that raises
        drops the gradients, and leaves the parameters as they were.
        """
        meet_compilers()
        if _groups(self._optimizer) != self._groups:
            raise ConfigError("Stepper.step: the optimizer has other parameters than before; make a new Stepper")
        if is_native(self._optimizer):
            if self._optimizer._optimizer_step_pre_hooks or self._optimizer._optimizer_step_post_hooks:
                raise ConfigError("Stepper.step: hooks of a snug optimizer's step would not be called, as C++ makes it; remove them")
            self._optimizer._native_optimizer()
            self._optimizer._opt_called = True  # which a schedule of torch's asks for
        tensors, of_tensors = _tensors_of(batch), loss_of
        if isinstance(batch, Mapping):
            names = list(batch)
            of_tensors = lambda *tensors: loss_of(**dict(zip(names, tensors)))
        with buffers_are_put_back(self._model.modules() if self._plans else ()):
            return self._stepper.step(tensors, of_tensors)

    @property
    def plan(self) -> str:
        """How `memory` was met in the last step; "" without a budget and before the first step."""
        return self._stepper.plan()


def _tensors_of(batch):
    if isinstance(batch, torch.Tensor):
        return [batch]
    parts = batch if isinstance(batch, Mapping) else dict(enumerate(batch)) if isinstance(batch, Sequence) else {"": batch}
    for name, part in parts.items():
        if not isinstance(part, torch.Tensor):
            raise ConfigError(f"Stepper.step: batch{f'[{name!r}]' if name != '' else ''} is a {type(part).__name__}; a batch is a tensor, "
                              "a tuple or list of tensors, or a dictionary of them; let loss_of use the rest where it is")
    return list(parts.values())


def _refuse_closures(optimizer):
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()  # self is the first
    required = [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if required:
        raise ConfigError(f"Stepper: {type(optimizer).__name__}.step() asks for a {required[0]}, by which it would run the model itself; "
                          "write such a step yourself, with snug.plan")


def _groups(optimizer):
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
