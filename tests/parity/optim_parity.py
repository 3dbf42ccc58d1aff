"""snug's AdamW, Adam and SGD against torch.optim's with fused=True, alone and under a GradScaler with steps that are skipped; their
states, saved by one and loaded by the other; and snug::clip_grad_norm_ against torch.nn.utils.clip_grad_norm_. All equal to the bit.

usage: optim_parity.py OPTIM_TOOL
"""

import math
import pathlib
import random
import sys
import tempfile

from optim_session import Session, torch

SIZES = [(1,), (7,), (64,), (300,)]
MATRICES = [(5, 7), (1, 40), (48, 20), (96, 96)]
EVERY = list(range(len(SIZES)))


def begin(session, generator, kind=""):
    session.new()
    for size in MATRICES if kind == "muon" else SIZES:
        session.param(torch.randn(size, generator=generator))


def set_gradients(session, generator, factor=1.0):
    for index, parameter in enumerate(session.parameters):
        session.grad(index, torch.randn(parameter.shape, generator=generator) * factor)


def random_options(kind, rng):
    if kind == "muon":
        return {
            "lr": rng.choice([1e-3, 0.1, 0.0]),
            "weight_decay": rng.choice([0.0, 0.1]),
            "momentum": rng.choice([0.0, 0.5, 0.95]),
            "nesterov": rng.random() < 0.5,
            "adjust_lr_fn": rng.choice([None, "original", "match_rms_adamw"]),
        }
    if kind == "fused_sgd":
        momentum = rng.choice([0, 0.9, 0.5])  # an integer, as Python's default is
        nesterov = momentum > 0 and rng.random() < 0.5
        return {
            "lr": rng.choice([1e-3, 0.1, 0.0]),
            "momentum": momentum,
            "dampening": 0 if nesterov else rng.choice([0, 0.3]),
            "weight_decay": rng.choice([0, 0.01, 0.5]),
            "nesterov": nesterov,
        }
    return {
        "lr": rng.choice([1e-3, 0.1, 0.0]),
        "betas": (rng.choice([0.9, 0.0]), rng.choice([0.999, 0.95])),
        "eps": rng.choice([1e-8, 1e-3]),
        "weight_decay": rng.choice([0.0, 0.01, 0.5]),
    }


def steps(session, generator, rng, kind):
    begin(session, generator, kind)
    options = random_options(kind, rng)
    getattr(session, kind)(EVERY[:2], **options)
    getattr(session, kind)(EVERY[2:], **options)
    scaled = rng.random() < 0.7
    if scaled:
        session.make_scaler(init=rng.choice([1024.0, 1000.0]), growth=2.0, backoff=0.5, interval=3)
    for step in range(20):
        set_gradients(session, generator, session.scaler.get_scale() if scaled else 1.0)
        # Skipping the first step leaves Python's SGD with a momentum buffer that was never written.
        if scaled and rng.random() < 0.2 and (step > 0 or kind != "fused_sgd"):
            bad = session.parameters[1].grad.clone()
            bad.view(-1)[3] = rng.choice([math.inf, math.nan])
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


def three_steps(session, generator):
    for _ in range(3):
        set_gradients(session, generator)
        session.step(0)
    session.values()


def state_goes_both_ways(tool, generator, rng, kind):
    """Three steps in both languages, then each goes on from the other's state, as it would have from its own."""
    options = random_options(kind, rng) | {"lr": 0.1}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        whole = Session()
        begin(whole, generator, kind)
        getattr(whole, kind)(EVERY, **options)
        three_steps(whole, generator)
        whole.save_optimizer(0, snug=folder / "snug", python=folder / "python")
        parameters = [parameter.detach().clone() for parameter in whole.parameters]
        seed = generator.initial_seed() + 1
        three_steps(whole, generator.manual_seed(seed))
        whole.compare(tool)

        resumed = Session()
        for parameter in parameters:
            resumed.param(parameter)
        getattr(resumed, kind)(EVERY, **random_options(kind, rng))
        resumed.load_optimizer(0, snug=folder / "python", python=folder / "snug")
        three_steps(resumed, generator.manual_seed(seed))
        resumed.compare(tool)
        assert resumed.answers[-1] == whole.answers[-1], kind


if __name__ == "__main__":
    everything = Session()
    random_choices = random.Random(1)
    random_numbers = torch.Generator().manual_seed(1)
    for kind in ("adamw", "adam", "fused_sgd", "muon"):
        for _ in range(12):
            steps(everything, random_numbers, random_choices, kind)
    for _ in range(200):
        clip(everything, random_numbers, random_choices)
    everything.compare(sys.argv[1])
    for kind in ("adamw", "adam", "fused_sgd", "muon"):
        for _ in range(4):
            state_goes_both_ways(sys.argv[1], random_numbers, random_choices, kind)
