"""snug::GradScaler against torch.amp.GradScaler: scale, growth count, skipped steps, gradients, parameters and errors, over random
sequences of calls with finite, infinite and NaN gradients, among them calls in the wrong order. One to three optimizers, each SGD
(which the scaler skips) or AdamW (which unscales and skips by itself).

usage: grad_scaler_parity.py OPTIM_TOOL
"""

import math
import random
import sys

from optim_session import Session, torch

SEQUENCES = 400
ROUNDS = 25


def gradient(rng, scale):
    values = [rng.uniform(-2, 2) * scale for _ in range(2)]
    if rng.random() < 0.25:
        values[rng.randrange(2)] = rng.choice([math.inf, -math.inf, math.nan, 3e38 * rng.choice([1, -1])])
    return torch.tensor(values)


def wrong_order(session, rng):
    """Calls that are mostly errors."""
    optimizer = rng.randrange(len(session.optimizers))
    # A step without any gradient is an error for both kinds of optimizer here, in Python for SGD alone.
    may_be_without = isinstance(session.optimizers[optimizer], torch.optim.SGD)
    rng.choice(
        [
            lambda: session.unscale(optimizer),
            lambda: session.step(optimizer),
            session.update,
            lambda: session.nograd(optimizer) if may_be_without else None,
            lambda: session.update(rng.choice([1.0, 1024.0])),
        ]
    )()


def sequence(session, rng):
    session.new()
    count = rng.choice([1, 2, 2, 3])
    for index in range(count):
        session.param(torch.tensor([rng.uniform(-1, 1), rng.uniform(-1, 1)]))
        if rng.random() < 0.5:
            session.sgd(rng.choice([0.125, 1.0]), [index])
        else:
            session.adamw([index], lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=rng.choice([0.0, 0.1]))
    session.make_scaler(
        init=rng.choice([1.0, 65536.0, 2.0**120, 2.0**-140]),
        growth=rng.choice([2.0, 1.5, 16.0]),
        backoff=rng.choice([0.5, 0.25, 0.9]),
        interval=rng.choice([1, 2, 5]),
    )
    for _ in range(ROUNDS):
        if rng.random() < 0.05:
            wrong_order(session, rng)
        session.scale()
        for optimizer in range(count):
            if session.parameters[optimizer].grad is None or rng.random() < 0.95:
                session.grad(optimizer, gradient(rng, rng.choice([1.0, 1024.0, 1e-20])))
        if rng.random() < 0.15:
            wrong_order(session, rng)
        for optimizer in rng.sample(range(count), rng.choice([1, count, count, count])):
            if rng.random() < 0.4:
                session.unscale(optimizer)
                session.grads()
            session.step(optimizer)
            if rng.random() < 0.1:
                wrong_order(session, rng)
        session.update()
        session.state()
        session.values()
        session.grads()


if __name__ == "__main__":
    everything = Session()
    generator = random.Random(1)
    for _ in range(SEQUENCES):
        sequence(everything, generator)
    everything.compare(sys.argv[1])
