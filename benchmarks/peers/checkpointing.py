"""The cases of benchmarks/checkpointing.cpp in Python PyTorch, with torch.utils.checkpoint, non-reentrant, which its documentation
recommends. Speaks the protocol of benchmarks/serve.h."""

import ctypes
import functools
import sys

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import serve
from gpt import Gpt


def tiny(call):
    x = torch.ones(1, requires_grad=True)
    return lambda: call(x).backward()


class MallInfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in
                ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def allocated_bytes():
    """Of the whole process, by glibc: PyTorch does not count a CPU's tensors."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallInfo
    info = mallinfo()
    return info.uordblks + info.hblkhd


def gpt(name, run_block):
    torch.manual_seed(1)
    model = Gpt(256, 256, 12, 8, 256)
    tokens = torch.randint(256, (4, 256))

    def loss():
        return F.cross_entropy(model(tokens, run_block).flatten(0, 1), tokens.flatten())

    loss()
    before = allocated_bytes()
    held = loss()
    print(f"{name}: Python holds {(allocated_bytes() - before) / 2**20:.1f} MiB for backward", file=sys.stderr)
    del held

    def step():
        model.zero_grad()
        loss().backward()

    return step


def call(block, x):
    return block(x)


def recompute(block, x):
    return checkpoint(block, x, use_reentrant=False)


def recompute_but_products(block, x):
    aten = torch.ops.aten
    saved = [aten.mm.default, aten.addmm.default, aten.bmm.default]
    return checkpoint(block, x, use_reentrant=False,
                      context_fn=functools.partial(create_selective_checkpoint_contexts, saved))


serve.serve({
    "tiny_plain": functools.partial(tiny, torch.sin),
    "tiny_checkpoint": functools.partial(tiny, functools.partial(recompute, torch.sin)),
    "gpt_plain": functools.partial(gpt, "gpt_plain", call),
    "gpt_every_block": functools.partial(gpt, "gpt_every_block", recompute),
    "gpt_save_matmuls": functools.partial(gpt, "gpt_save_matmuls", recompute_but_products),
})
