"""snug::GradScaler against torch.amp.GradScaler: scaled losses, scale, growth count, skipped steps, gradients, parameters and errors,
equal to the bit over random sequences of calls with finite, infinite and NaN gradients, one or more losses, clipping, states that are
loaded, and calls in the wrong order. One to three optimizers, each SGD (which the scaler skips) or AdamW (which unscales and skips
by itself). And states go both ways, those of a scaler with more options than Python's as well.

usage: grad_scaler_parity.py OPTIM_TOOL
"""

import math
import random
import sys

from optim_session import Session, answers_of, state_from, state_text, torch

SEQUENCES = 5000
ROUNDS = 6  # on average


def gradient(rng, scale):
    values = [rng.uniform(-2, 2) * scale for _ in range(2)]
    if rng.random() < 0.25:
        values[rng.randrange(2)] = rng.choice([math.inf, -math.inf, math.nan, 3e38 * rng.choice([1, -1])])
    return torch.tensor(values)


def wrong_order(session, rng):
    """Calls that are mostly errors."""
    optimizer = rng.randrange(len(session.optimizers))
    # Python's fused optimizers end with an AttributeError where a gradient comes after an unscale_() that found none.
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
    for _ in range(rng.randint(2, 2 * ROUNDS - 2)):
        if rng.random() < 0.05:
            wrong_order(session, rng)
        session.scale([rng.uniform(-10, 10) for _ in range(rng.choice([1, 1, 2, 3]))])
        for optimizer in range(count):
            if session.parameters[optimizer].grad is None or rng.random() < 0.95:
                session.grad(optimizer, gradient(rng, rng.choice([1.0, 1024.0, 1e-20])))
        if rng.random() < 0.15:
            wrong_order(session, rng)
        for optimizer in rng.sample(range(count), rng.choice([1, count, count, count])):
            if rng.random() < 0.4:
                session.unscale(optimizer)
                if rng.random() < 0.5:
                    session.clip(rng.choice([0.1, 1.0, 100.0]), rng.choice([2.0, math.inf]), [optimizer])
                session.grads()
            session.step(optimizer)
            if rng.random() < 0.1:
                wrong_order(session, rng)
        session.update()
        session.state()
        session.values()
        session.grads()
        if rng.random() < 0.05 and session.scaler.get_scale() > 0:
            session.load(session.scaler.state_dict())
        if rng.random() < 0.02:
            session.load(a_state(rng))


def a_state(rng):
    """As a Python run might have saved it."""
    scaler = torch.amp.GradScaler("cpu", 2.0 ** rng.randint(-10, 20), rng.choice([2.0, 1.5]), 0.5, rng.choice([1, 3, 2000]))
    return scaler.state_dict() | {"_growth_tracker": rng.randint(0, 2)}


def states_go_both_ways(tool):
    """What snug saves, of a default scaler and of one with hysteresis, Python loads; what Python then saves, snug loads."""
    for hysteresis, names in ((1, 5), (3, 6)):
        rounds = ["scale 3f800000", "grad 0 7f800000", "step 0", "update"]
        begin = ["new", "param 3f800000", "sgd 0.1 0", f"scaler 1024.0 4.0 0.25 7 {hysteresis}"]
        saved = state_from(answers_of(tool, begin + rounds + ["state"])[-1].removeprefix("ok"))
        assert len(saved) == names, saved
        python = torch.amp.GradScaler("cpu")
        python.load_state_dict(saved)
        assert python.state_dict() == {name: saved[name] for name in python.state_dict()}, (python.state_dict(), saved)
        again = answers_of(tool, begin[:-1] + ["scaler 1.0 2.0 0.5 9", f"load {state_text(python.state_dict())}", "state"])[-1]
        assert state_from(again.removeprefix("ok")) == python.state_dict(), (again, python.state_dict())
    integers = torch.amp.GradScaler("cpu", 1024, 4, 0.25, 7).state_dict()  # the scale too, before its first use
    assert isinstance(integers["scale"], int), integers
    again = answers_of(tool, ["new", "scaler 1.0 2.0 0.5 9", f"load {state_text(integers)}", "state"])[-1]
    assert state_from(again.removeprefix("ok")) == integers, (again, integers)


if __name__ == "__main__":
    everything = Session()
    generator = random.Random(1)
    for _ in range(SEQUENCES):
        sequence(everything, generator)
    everything.compare(sys.argv[1])
    states_go_both_ways(sys.argv[1])
