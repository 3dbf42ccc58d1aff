"""Saved-tensor hooks and the memory meter in a process of Python's torch, which has an autograd engine of its own: whichever of
the two libraries is used first, hooks see what is saved, Python's hooks are the inner ones, and gradients are the same.

usage: hooks_parity.py TOOL            (a shared library, see hooks_tool.cpp)
"""
import ctypes
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("torch") is None:
    print("skipped: no torch in this Python")
    sys.exit(77)


def check(first, path):
    def load():
        tool = ctypes.CDLL(path)
        tool.hooks_off.restype = tool.meter_off.restype = ctypes.c_int64
        tool.hooks_on()
        tool.hooks_off()
        return tool

    if first == "snug":
        tool = load()
        import torch
    else:
        import torch
        torch.ones(3, requires_grad=True).exp().sum().backward()
        tool = load()

    def step():
        a = torch.arange(100.0, requires_grad=True)
        y = (a * a.detach().sqrt()).sin().square().sum()
        y.backward()
        return a.grad

    expected = step()
    tool.hooks_on()
    found = step()
    assert tool.hooks_off() == 3, "hooks were lost"
    assert torch.equal(found, expected)

    seen = []
    keep = lambda t: seen.append(t) or t
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):  # outside
        tool.hooks_on()
        assert torch.equal(step(), expected)
        assert tool.hooks_off() == 3 and not seen
    tool.hooks_on()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):  # inside
        assert torch.equal(step(), expected)
    assert tool.hooks_off() == 0 and len(seen) == 3

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            raise ValueError("of Python's")

    tool.hooks_on()
    try:
        Fails.apply(torch.ones(3, requires_grad=True)).sum().backward()
        raise AssertionError("no error")
    except ValueError as error:
        assert str(error) == "of Python's"
    tool.hooks_off()

    tool.meter_on()
    y = torch.ones(1000, requires_grad=True).exp()
    big = torch.empty(100000)
    assert tool.meter_off() == 4000, "the meter was not told"


if len(sys.argv) == 3:
    check(sys.argv[1], sys.argv[2])
else:
    for first in ("torch", "snug"):
        subprocess.run([sys.executable, __file__, first, sys.argv[1]], check=True, timeout=250)
        print(f"{first} first: good")
