"""Where snug meets other versions of PyTorch, and parts of it that a plan does not know."""

import contextlib
import functools
import sys
import threading
from collections.abc import Iterable, Iterator

import torch
import torch._ops
from torch.autograd.function import BackwardCFunction

from . import _build
from ._errors import ConfigError


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


def refuse_compiled_autograd() -> None:
    """Compiled autograd takes the backward pass apart, and takes hooks of Python alone."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    if module is not None and getattr(module, "compiled_autograd_enabled", False):
        raise ConfigError("snug: compiled autograd is on, in which nothing can be planned; turn it off around the step")


def refuse_sharded_model(model: torch.nn.Module) -> None:
    """ConfigError for a model of FSDP, or one that has a part of it."""
    for module in model.modules():
        if _is_sharded(module):
            raise _sharded(module, "pass plan=False, which makes `memory` a limit alone")


@contextlib.contextmanager
def sharded_models_are_refused(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """ConfigError, within the block, where this thread runs one of those `modules` that are sharded by FSDP."""
    thread = threading.get_ident()

    def refuse(module, _):
        if threading.get_ident() == thread:
            raise _sharded(module, "leave out the plan")

    with contextlib.ExitStack() as hooks:
        for module in modules:
            if _is_sharded(module):
                hooks.callback(module.register_forward_pre_hook(refuse, prepend=True).remove)
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
