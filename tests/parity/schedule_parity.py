"""snug's schedule and Ema against torch.optim.lr_scheduler and torch.optim.swa_utils, for random configurations:
learning rates to 1e-12, averages to the bit.

usage: schedule_parity.py SCHEDULE_TOOL
"""

import math
import random
import subprocess
import sys
import warnings

try:
    import torch
    from torch.optim import lr_scheduler as schedulers
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

RELATIVE = 1e-12
choices = random.Random(1)
commands, expected = [], []


def record(values, tolerance, *words):
    commands.append(" ".join(w.hex() if isinstance(w, float) else str(w) for w in words))
    expected.append(([float(v) for v in values], tolerance))


def optimizer(lr):
    return torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=lr)


def rates(optimizer, scheduler, steps):
    """What a loop of optimizer.step() and scheduler.step() uses in each step."""
    found = [optimizer.param_groups[0]["lr"]]
    while len(found) < steps:
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


def closed_form(optimizer, scheduler, steps):
    """The same from Python's closed formula, since errors of the recursive one grow where a rate goes to 0."""
    found = []
    for step in range(steps):
        scheduler.step(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def warm_up(sgd, steps):
    if steps == 1:
        return schedulers.ConstantLR(sgd, factor=1.0, total_iters=1)
    return schedulers.LinearLR(sgd, start_factor=1 / steps, end_factor=1.0, total_iters=steps - 1)


def cosine():
    peak, warmup = choices.choice([3e-4, 0.1, 7.0]), choices.randint(0, 40)
    floor = peak * choices.choice([0.0, 0.01, 0.5, 1.0])
    if floor == 0:
        warmup = 0  # the closed formula has no warm-up
    falling = choices.randint(1, 300)
    sgd, total = optimizer(peak), warmup + falling
    rising = [warm_up(sgd, warmup)] if warmup else []
    scheduler = schedulers.CosineAnnealingLR(sgd, T_max=falling, eta_min=floor)
    if rising:
        scheduler = schedulers.SequentialLR(sgd, [*rising, scheduler], milestones=[warmup])
    values = (closed_form if floor == 0 else rates)(sgd, scheduler, total)
    record(values, RELATIVE, "cosine", peak, warmup, total, floor, total)


def ema():
    decay, dtype = choices.choice([0.0, 0.5, 0.999, 1.0]), choices.choice(["fp32", "bf16"])
    updates = choices.randint(1, 40)
    rows = torch.randn(updates, 13)
    if dtype == "bf16":
        rows = rows.bfloat16().float()  # snug averages these in FP32
    model = torch.nn.Linear(13, 1, bias=False)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    for row in rows:
        with torch.no_grad():
            model.weight[0] = row
        average.update_parameters(model)
    record(average.module.weight[0].tolist(), 0, "ema", decay, dtype, updates, *rows.flatten().tolist())


def agree(ours, theirs, tolerance):
    if math.isnan(theirs) or math.isnan(ours):
        return math.isnan(theirs) and math.isnan(ours)
    return ours == theirs or abs(ours - theirs) <= tolerance * abs(theirs)


def main():
    warnings.simplefilter("ignore")  # step(epoch) is deprecated, and reads the closed formula
    torch.manual_seed(1)
    for part in (cosine, ema):
        for _ in range(100):
            part()
    told = subprocess.run([sys.argv[1]], input="\n".join(commands), capture_output=True, text=True, check=True)
    answers = told.stdout.splitlines()
    assert len(answers) == len(commands), (len(answers), len(commands), told.stderr)
    for command, (theirs, tolerance), line in zip(commands, expected, answers):
        ours = [float.fromhex(word) for word in line.split()]
        assert len(ours) == len(theirs), (command[:200], len(ours), len(theirs))
        for i, (mine, python) in enumerate(zip(ours, theirs)):
            assert agree(mine, python, tolerance), f"{command[:200]}\n  value {i}: Python gives {python!r}, snug {mine!r}"
    print(f"{len(commands)} configurations agree, {sum(len(theirs) for theirs, _ in expected)} values")


if __name__ == "__main__":
    main()
