"""Where snug meets other versions of PyTorch, and parts of it that a plan does not know."""

import contextlib
import functools
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator

import torch
import torch._ops
from torch.autograd.function import BackwardCFunction

from . import _build
from ._compiled import show_compiled_regions
from ._errors import ConfigError

#: Attributes that are True where a module checkpoints by itself, and what switches that off.
_OWN_CHECKPOINTS = {"gradient_checkpointing": "gradient_checkpointing_disable()", "grad_checkpointing": "set_grad_checkpointing(False)"}


def prepare() -> None:
    """Before the extension is loaded. ImportError where it was built against another torch."""
    built, here = (".".join(version.split(".")[:2]) for version in (_build.TORCH, torch.__version__))
    if built != here:
        raise ImportError(f"snug {_build.SNUG} was built against torch {_build.TORCH}, and this is torch {torch.__version__}; "
                          f"install torch {built}, or build snug again: pip install --no-build-isolation ./python")
    let_higher_order_operators_pass()
    check_what_functions_return()


def check_what_functions_return() -> None:
    """An autograd.Function, as each compiled region is one, may return a saved tensor as a gradient, which must become a copy then.
    As that is looked at here, it gets saved tensors as they are, and not copies of all."""
    from . import _snug

    def checked(apply):
        return functools.wraps(apply)(lambda node, *gradients: _snug.run_checked(apply, node, *gradients))

    for name in ("apply", "apply_boxed"):
        if apply := vars(BackwardCFunction).get(name):
            setattr(BackwardCFunction, name, checked(apply))


def meet_compilers() -> None:
    """Before a plan is made or followed. ConfigError for compiled autograd, which takes the backward pass apart, and takes hooks of Python
    alone."""
    show_compiled_regions()
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is not None and getattr(module, "compiled_autograd_enabled", False):
        raise ConfigError("snug: compiled autograd is on, in which nothing can be planned; turn it off around the step")


def refuse_sharded_model(model: torch.nn.Module) -> None:
    """ConfigError for a model of FSDP, or one that has a part of it."""
    for module in model.modules():
        if _is_sharded(module):
            raise _sharded(module, "pass plan=False, which makes `memory` a limit alone")


def warn_of_own_checkpoints(modules: Iterable[torch.nn.Module]) -> None:
    """UserWarning for the first that computes activations again by itself, as models of transformers, diffusers and timm may."""
    for module in modules:
        for name, cure in _OWN_CHECKPOINTS.items():
            if module.training and vars(module).get(name) is True:
                warnings.warn(f"snug: {type(module).__name__} has gradient checkpointing of its own on, which keeps control of what is saved "
                              "inside: little is left to plan, and more is computed again than by a plan alone. Switch it off: "
                              f"model.{cure}")
                return


@contextlib.contextmanager
def modules_are_looked_at(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Within the block, where this thread runs one of those `modules`: ConfigError if it is sharded by FSDP, and a warning if it
    checkpoints by itself."""
    thread, seen = threading.get_ident(), []

    def look(module, _):
        if threading.get_ident() == thread:
            if _is_sharded(module):
                raise _sharded(module, "leave out the plan")
            seen.append(module)

    with contextlib.ExitStack() as hooks:
        hooks.callback(warn_of_own_checkpoints, seen)
        for module in modules:
            if _is_sharded(module) or not vars(module).keys().isdisjoint(_OWN_CHECKPOINTS):
                hooks.callback(module.register_forward_pre_hook(look, prepend=True).remove)
        yield


def _is_sharded(module):
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))


def _sharded(module, cure):
    return ConfigError(f"snug: {type(module).__name__} is sharded by FSDP (fully_shard or FullyShardedDataParallel), which gives the memory of "
                       "parameters back and takes it again during a step; what a plan computes again would read other values there, and "
                       f"gradients would be wrong. Plan the model as it is before, or in DistributedDataParallel, or {cure}")


def let_higher_order_operators_pass() -> None:
    """torch.cond and its kin name each dispatch key that they pass through. snug sees operators on the key Fake."""
    try:
        key = torch._C._parse_dispatch_key("Fake")
        default = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
        operators = torch._ops._higher_order_ops
    except (AttributeError, RuntimeError):
        return
    if key is None or key in default:
        return
    default.append(key)
    for operator in operators.values():
        operator.non_fallthrough_keys = operator.non_fallthrough_keys.remove(key)
