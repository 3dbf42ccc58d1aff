"""The cases of benchmarks/optimizers.cpp in Python PyTorch, with its fused AdamW and fused-path GradScaler. Speaks the protocol of
benchmarks/serve.h."""

import functools
import itertools

import torch

import serve

DEVICE = serve.take_device()


def gpt_parameters(d):
    torch.manual_seed(1)
    shapes = [(256, d), (256, d)]
    for _ in range(6):
        shapes += [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    shapes += [(d,)]
    parameters = [torch.nn.Parameter((torch.randn(shape) * 0.02).to(DEVICE)) for shape in shapes]
    for p in parameters:
        p.grad = torch.randn_like(p) * 1e-3
    return parameters


def fused(d):
    optimizer = torch.optim.AdamW(gpt_parameters(d), lr=1e-4, fused=True)
    return optimizer.step


def fused_unscale_clip(d):
    parameters = gpt_parameters(d)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0)
    scaler.scale(torch.ones((), device=DEVICE))
    scales = itertools.cycle([0.5, 2.0])  # gradients are unscaled in earnest and yet stay what they are

    def step():
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, 1e6, foreach=True)
        scaler.step(optimizer)
        scaler.update(next(scales))

    return step


serve.serve({
    name + size: functools.partial(case, d)
    for name, case in (("fused", fused), ("fused_unscale_clip", fused_unscale_clip))
    for size, d in (("", 384), ("_large", 768))
}, DEVICE)
