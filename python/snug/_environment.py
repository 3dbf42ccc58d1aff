"""Where snug meets other versions of PyTorch, parts of it that a plan does not know, and random numbers that are not torch's."""

import functools
import random
import sys
from typing import Any

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
