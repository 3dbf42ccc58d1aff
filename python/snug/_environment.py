"""Where a plan would meet parts of PyTorch that it does not know."""

import sys

import torch
import torch._ops

from ._errors import ConfigError


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
