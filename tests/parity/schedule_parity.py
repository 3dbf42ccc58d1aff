"""snug's schedules, ReduceOnPlateau, clip_grad_value_ and Ema against torch.optim.lr_scheduler, torch.nn.utils and
torch.optim.swa_utils, for random configurations: learning rates to 1e-12, clipped gradients and averages to the bit.

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


def warmed_up(name, decay):
    peak, warmup = choices.choice([3e-4, 0.1, 7.0]), choices.randint(0, 40)
    total = warmup + choices.randint(1, 300)
    floor = peak * choices.choice([0.0, 0.01, 0.5, 1.0])
    if floor == 0:
        warmup, sgd = 0, optimizer(peak)
        values = closed_form(sgd, decay(sgd, peak, total, floor), total)
    else:
        sgd = optimizer(peak)
        after = decay(sgd, peak, total - warmup, floor)
        if warmup:
            sgd = optimizer(peak)
            parts = [warm_up(sgd, warmup), decay(sgd, peak, total - warmup, floor)]
            after = schedulers.SequentialLR(sgd, parts, milestones=[warmup])
        values = rates(sgd, after, total)
    record(values, RELATIVE, name, peak, warmup, total, floor, total)


def cosine():
    warmed_up("cosine", lambda sgd, peak, steps, floor: schedulers.CosineAnnealingLR(sgd, T_max=steps, eta_min=floor))


def linear():
    warmed_up("linear", lambda sgd, peak, steps, floor: schedulers.LinearLR(
        sgd, start_factor=1.0, end_factor=floor / peak, total_iters=steps))  # fmt: skip


def constant():
    peak, warmup = choices.uniform(1e-4, 1), choices.randint(1, 50)
    sgd = optimizer(peak)
    record(rates(sgd, warm_up(sgd, warmup), 100), RELATIVE, "constant", peak, warmup, 100)


def step():
    initial, every, gamma = choices.uniform(1e-4, 1), choices.randint(1, 50), choices.choice([0.1, 0.5, 0.97, 1.0])
    sgd = optimizer(initial)
    scheduler = schedulers.StepLR(sgd, step_size=every, gamma=gamma)
    record(rates(sgd, scheduler, 300), RELATIVE, "step", initial, every, gamma, 300)


def one_cycle():
    peak, total = choices.uniform(1e-4, 10), choices.randint(1, 300)
    start = choices.choice([0.0, 0.3, 1.0, choices.random()])
    if start * total == 1:
        return  # Python divides by zero
    anneal = choices.choice(["cos", "linear"])
    div, final = choices.uniform(1, 100), choices.choice([1.0, 100.0, 1e4])
    sgd = optimizer(1.0)
    scheduler = schedulers.OneCycleLR(sgd, max_lr=peak, total_steps=total, pct_start=start, anneal_strategy=anneal,
                                      cycle_momentum=False, div_factor=div, final_div_factor=final)  # fmt: skip
    record(rates(sgd, scheduler, total), RELATIVE, "one_cycle", peak, total, start, anneal, div, final, total)


def plateau():
    mode, threshold_mode = choices.choice(["min", "max"]), choices.choice(["rel", "abs"])
    options = {
        "mode": mode,
        "factor": choices.choice([0.1, 0.5, 0.9]),
        "patience": choices.randint(0, 5),
        "threshold": choices.choice([0.0, 1e-4, 0.1, 0.1]),
        "threshold_mode": threshold_mode,
        "cooldown": choices.choice([0, 0, 1, 4]),
        "min_lr": choices.choice([0.0, 1e-3, 0.05]),
        "eps": choices.choice([0.0, 1e-8, 1e-3]),
    }
    lr = choices.choice([0.1, 1.0])
    metrics = [5.0]  # a walk that gets better on the whole, at times by less than the threshold
    while len(metrics) < 300:
        metrics.append(metrics[-1] * (1 + choices.gauss(0.01 if mode == "max" else -0.01, 0.05)))
    if choices.random() < 0.3:
        metrics[choices.randrange(300)] = choices.choice([math.nan, math.inf, -math.inf])
    if choices.random() < 0.3:
        metrics = [round(metric) for metric in metrics] if all(map(math.isfinite, metrics)) else metrics
    sgd = optimizer(lr)
    scheduler = schedulers.ReduceLROnPlateau(sgd, **options)
    values = []
    for metric in metrics:
        scheduler.step(metric)
        values.append(sgd.param_groups[0]["lr"])
    record(values, RELATIVE, "plateau", lr, *options.values(), *map(float, metrics))


def clip():
    value = choices.choice([0.0, 0.1, 1.0, math.inf])
    gradient = torch.randn(100)
    gradient[3] = choices.choice([math.nan, math.inf, -math.inf, 0.0])
    parameter = torch.zeros(100, requires_grad=True)
    parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_value_([parameter], value)
    record(parameter.grad.tolist(), 0, "clip", value, *gradient.tolist())


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
    for part in (cosine, linear, constant, step, one_cycle, plateau, clip, ema):
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
