"""snug::AdamW against torch.optim.AdamW(fused=True), alone and under a GradScaler with steps that are skipped, and
snug::clip_grad_norm_ against torch.nn.utils.clip_grad_norm_: equal to the bit.

usage: optim_parity.py OPTIM_TOOL
"""

import math
import random
import sys

from optim_session import Session, torch

SIZES = [1, 7, 64, 300]
EVERY = list(range(len(SIZES)))


def begin(session, generator):
    session.new()
    for size in SIZES:
        session.param(torch.randn(size, generator=generator))


def set_gradients(session, generator, factor=1.0):
    for index, size in enumerate(SIZES):
        session.grad(index, torch.randn(size, generator=generator) * factor)


def adamw(session, generator, rng):
    begin(session, generator)
    options = {
        "lr": rng.choice([1e-3, 0.1, 0.0]),
        "betas": (rng.choice([0.9, 0.0]), rng.choice([0.999, 0.95])),
        "eps": rng.choice([1e-8, 1e-3]),
        "weight_decay": rng.choice([0.0, 0.01, 0.5]),
    }
    session.adamw(EVERY[:2], **options)
    session.adamw(EVERY[2:], **options)
    scaled = rng.random() < 0.7
    if scaled:
        session.make_scaler(init=rng.choice([1024.0, 1000.0]), growth=2.0, backoff=0.5, interval=3)
    for _ in range(20):
        set_gradients(session, generator, session.scaler.get_scale() if scaled else 1.0)
        if scaled and rng.random() < 0.2:
            bad = session.parameters[1].grad.clone()
            bad[3] = rng.choice([math.inf, math.nan])
            session.grad(1, bad)
        if scaled:
            session.scale()
        unscale = rng.random() < 0.5
        for optimizer in range(2):
            if scaled and unscale:
                session.unscale(optimizer)
                session.clip(rng.choice([0.5, 1e3]), 2.0, EVERY[:2] if optimizer == 0 else EVERY[2:])
            session.step(optimizer)
        if scaled:
            session.update()
            session.state()
        session.values()
        session.grads()


def clip(session, generator, rng):
    begin(session, generator)
    set_gradients(session, generator, rng.choice([1.0, 1e-4, 1e4]))
    if rng.random() < 0.2:
        session.nograd(rng.choice(EVERY))
    if rng.random() < 0.3:
        session.grad(0, torch.tensor([rng.choice([math.inf, -math.inf, math.nan, 0.0])]))
    session.clip(rng.choice([0.0, 0.1, 1.0, 1e6]), rng.choice([1.0, 2.0, 3.5, math.inf]), rng.sample(EVERY, rng.randint(0, 4)))
    session.grads()


if __name__ == "__main__":
    everything = Session()
    random_choices = random.Random(1)
    random_numbers = torch.Generator().manual_seed(1)
    for _ in range(12):
        adamw(everything, random_numbers, random_choices)
    for _ in range(200):
        clip(everything, random_numbers, random_choices)
    everything.compare(sys.argv[1])
