"""Lets the programs of benchmarks/ take turns and prints ratios; script/bench calls it.

In each turn the case, the one that it is divided by, and that one once more run one after the other, in another order each time.
A ratio is the median over the turns of quotients within a turn. Beside it stand its bootstrap interval, the same of CPU time, the second
case against itself (A/A), and a verdict on the target (benchmarks/ratios.py).

usage: run.py BUILD_DIR [--pairs N] [--only TEXT] [--device DEVICE] [--write FILE] [--json FILE]
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time

import ratios as stats

ROOT = pathlib.Path(__file__).resolve().parent
OWN_PYTHON = ROOT.parent / "build/venv/bin/python"
PYTHON = OWN_PYTHON if OWN_PYTHON.exists() else sys.executable


class AtMost(float):
    """A target that is the most that may be."""


# (what, (program, case), the one whose time it is divided by, calls a turn, target). "a - b" is the difference of two cases. A target is
# the least that is asked for; AtMost, the most. Without a second program the number is seconds, of as many calls as a turn has.
# The optimizer's claims are made for 42.9 million parameters, and measured for 10.8 million too.
CLAIMS = [
    claim
    for size, name, calls in (("", "10.8 M: ", 5), ("_large", "42.9 M: ", 2))
    for claim in (
        (name + "AdamW step: torch::optim::AdamW (C++) / snug",
         ("peers/optimizers", "adamw" + size), ("optimizers", "snug_adamw" + size), calls, 5.0),
        (name + "unscale, clip, AdamW step: LibTorch's C++ / snug",
         ("peers/optimizers", "adamw_unscale_clip" + size), ("optimizers", "snug_adamw_unscale_clip" + size), calls, 5.0),
        (name + "AdamW step: Python fused / snug",
         ("python:optimizers", "fused" + size), ("optimizers", "snug_adamw" + size), 2 * calls, 1.0),
        (name + "unscale, clip, AdamW step: Python fused / snug",
         ("python:optimizers", "fused_unscale_clip" + size), ("optimizers", "snug_adamw_unscale_clip" + size), 2 * calls, 1.0),
        (name + "AdamW step: snug / snug 8-bit",
         ("optimizers", "snug_adamw" + size), ("optimizers", "snug_adamw8bit" + size), 2 * calls, 1.3),
        (name + "BF16 weights: AdamW with masters / AdamW8bit with split weights",
         ("optimizers", "snug_masters" + size), ("optimizers", "snug_adamw8bit_bf16" + size), 2 * calls, 1.0),
        (name + "AdamW step with GradScaler / without",
         ("optimizers", "snug_adamw_scaler" + size), ("optimizers", "snug_adamw" + size), 2 * calls, None),
    )
] + [
    ("checkpoint of one tiny operator, what it adds: Python / snug",
     ("python:checkpointing", "tiny_checkpoint - tiny_plain"), ("checkpointing", "tiny_checkpoint - tiny_plain"), 2000, 10.0),
    ("GPT of 12 blocks, each checkpointed: Python / snug",
     ("python:checkpointing", "gpt_every_block"), ("checkpointing", "gpt_every_block"), 1, 1.0),
    ("GPT of 12 blocks: each checkpointed / plain, snug",
     ("checkpointing", "gpt_every_block"), ("checkpointing", "gpt_plain"), 1, None),
    ("GPT of 12 blocks: each checkpointed / plain, Python",
     ("python:checkpointing", "gpt_every_block"), ("python:checkpointing", "gpt_plain"), 1, None),
    ("GPT of 12 blocks, each checkpointed but for matrix products: Python / snug",
     ("python:checkpointing", "gpt_save_matmuls"), ("checkpointing", "gpt_save_matmuls"), 1, 1.0),
    ("GPT of 12 blocks, each checkpointed but for matrix products, what it adds: Python / snug",
     ("python:checkpointing", "gpt_save_matmuls - gpt_plain"), ("checkpointing", "gpt_save_matmuls - gpt_plain"), 3, 3.0),
    ("GPT of 12 blocks: each checkpointed but for matrix products / plain, snug",
     ("checkpointing", "gpt_save_matmuls"), ("checkpointing", "gpt_plain"), 1, None),
    ("GPT of 12 blocks: each checkpointed but for matrix products / plain, Python",
     ("python:checkpointing", "gpt_save_matmuls"), ("python:checkpointing", "gpt_plain"), 1, None),
    ("GPT of 12 blocks: planned for half of the activation peak / plain",
     ("checkpointing", "gpt_half"), ("checkpointing", "gpt_plain"), 3, AtMost(1.04)),
    ("GPT of 12 blocks: planned for a quarter / plain",
     ("checkpointing", "gpt_quarter"), ("checkpointing", "gpt_plain"), 3, AtMost(1.10)),
    ("GPT of 12 blocks: planned for 9 % / plain", ("checkpointing", "gpt_9_percent"), ("checkpointing", "gpt_plain"), 3, AtMost(1.14)),
    ("GPT of 12 blocks: each checkpointed / planned for the same bytes",
     ("checkpointing", "gpt_every_block"), ("checkpointing", "gpt_as_every_block"), 3, 1.08),
    ("step of a small network in 4 micro-batches: Stepper / by hand", ("steps", "stepper"), ("steps", "by_hand"), 50, None),
    ("the same within a budget: Stepper / by hand", ("steps", "budget"), ("steps", "by_hand"), 50, None),
    ("sine and cosine, 20,000 points, hidden 150, FP32, an epoch: Python / snug", ("python:sin_cos", "float32"), ("sin_cos", "float32"), 10, 1.1),
    ("sine and cosine, the same under autocast to BF16: Python / snug", ("python:sin_cos", "bfloat16"), ("sin_cos", "bfloat16"), 10, None),
    ("GPT of 48 blocks: seconds to search for a plan", ("checkpointing", "search_48"), None, 1, AtMost(1)),
    ("GPT of 48 blocks: seconds to search for ten budgets", ("checkpointing", "curve_48"), None, 1, AtMost(2)),
    # A thousand calls of a thousand operators: a second is a microsecond for each.
    ("what a plan adds to an operator, microseconds",
     ("checkpointing", "operators_planned - operators_plain"), None, 1000, AtMost(1)),
] + [
    (f"data parallel, 2 ranks, K = {k}: Python's DDP with no_sync / snug",
     ("python:data_parallel", f"k{k}_once"), ("data_parallel", f"k{k}_once"), 8 // k, 1.0)
    for k in (1, 2, 4, 8)
] + [
    (f"step of a GPT of 6 blocks on 2 ranks: {what} in shares / DataParallel", ("data_parallel", way), ("data_parallel", "replicated"), 4, None)
    for way, what in (("state", "state"), ("gradients", "gradients and state"), ("weights", "weights, gradients and state"))
]


class Program:
    """A benchmark program that is running."""

    def __init__(self, build, name, device):
        if name.startswith("python:"):
            command = [str(PYTHON), str(ROOT / "peers" / (name[7:] + ".py"))]
        else:
            command = [str(pathlib.Path(build) / "benchmarks" / name)]
        if device != "cpu":
            command += ["--device", device]
        # Threads that wait do not spin, so that the program whose turn it is has the machine to itself, and they stay
        # on cores of their own, as Linux may otherwise put both on one.
        environment = dict(os.environ, OMP_WAIT_POLICY="passive")
        # Ranks have a thread each, and would inherit one core from the process that starts them.
        if not name.endswith("data_parallel"):
            environment.update(OMP_PROC_BIND="true", OMP_PLACES="cores")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.read()

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"bench: a program ended with status {self.process.wait()}")
        return line

    def run(self, case, repeats):
        """Seconds of wall time and of CPU time."""
        with_it, _, without = case.partition(" - ")
        wall, cpu = self.time(with_it, repeats)
        if without:
            less = self.time(without, repeats)
            wall, cpu = wall - less[0], cpu - less[1]
        return wall, cpu

    def cpu_seconds(self):
        """Of all threads of the process, not of processes that it starts. The clock of another process: clock_getcpuclockid(3)."""
        return time.clock_gettime((~self.process.pid << 3) | 2)

    def time(self, case, repeats):
        before = self.cpu_seconds()
        self.process.stdin.write(f"{case} {repeats}\n")
        self.process.stdin.flush()
        wall = float(self.read())
        return wall, self.cpu_seconds() - before

    def stop(self):
        self.process.stdin.close()
        self.process.wait()


def cpu_name():
    text = pathlib.Path("/proc/cpuinfo").read_text() if pathlib.Path("/proc/cpuinfo").exists() else ""
    found = re.search(r"model name\s*:\s*(.*)", text)
    return found.group(1) if found else platform.processor()


def measure(programs, claim, pairs):
    """Turns of (seconds of the case, of the other one, of the other one again), each (wall, CPU). Without another: of the case alone."""
    _, a, b, repeats, _ = claim
    sides = [a, b, b] if b else [a, a]
    for program, case in {side: None for side in sides}:
        programs[program].run(case, 1)
    turns = []
    for turn in range(pairs):
        order = [(turn + i) % len(sides) for i in range(len(sides))]
        times = [None] * len(sides)
        for i in order if turn % 2 == 0 else reversed(order):
            times[i] = programs[sides[i][0]].run(sides[i][1], repeats)
        turns.append(times)
    return turns


def result(claim, turns):
    """A claim's entry in the JSON file."""
    what, a, b, _, target = claim
    wall, cpu = ([[side[clock] for side in turn] for turn in turns] for clock in (0, 1))
    # A process that starts others is not where their CPU time is counted.
    counts_cpu = b is not None and not any(side[0].startswith("python:data_parallel") for side in (a, b))
    if b is None:
        ratio, same = stats.summary([turn[0] for turn in wall]), stats.summary([turn[1] / turn[0] for turn in wall])
    else:
        ratio, same = stats.summary([turn[0] / turn[1] for turn in wall]), stats.summary([turn[2] / turn[1] for turn in wall])
    at_most = isinstance(target, AtMost)
    return {"what": what, "pairs": len(turns), "wall": ratio, "cpu": stats.summary([turn[0] / turn[1] for turn in cpu if turn[1] > 0]) if counts_cpu else None,
            "same": same, "target": target, "at_most": at_most, "verdict": stats.verdict(target, at_most, ratio, same)}


def row(entry):
    def of(summary):
        return f"{summary['median']:.2f} ({summary['low']:.2f} to {summary['high']:.2f})" if summary else ""

    target = "" if entry["target"] is None else f"at most {entry['target']:g}" if entry["at_most"] else f"at least {entry['target']:g}"
    wall = entry["wall"]
    return (f"| {entry['what']} | {wall['median']:.2f} | {wall['lowest']:.2f} to {wall['highest']:.2f} | {target} | {wall['low']:.2f} to {wall['high']:.2f} "
            f"| {of(entry['cpu'])} | {of(entry['same'])} | {entry['verdict'] or ''} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cpu", help="of the programs that have a choice")
    parser.add_argument("--write", help="the table, as Markdown")
    parser.add_argument("--json", help="everything that was measured")
    arguments = parser.parse_args()

    lines = [f"{datetime.date.today()}, {os.cpu_count()} cores of {cpu_name()}; {arguments.pairs} turns, script/bench", "",
             "| ratio of times, unless another unit is named | median | lowest to highest | target | interval of 95 % | of CPU times | against itself | verdict |",
             "|---|---|---|---|---|---|---|---|"]
    print("\n".join(lines), flush=True)
    entries = []
    for claim in CLAIMS:
        if arguments.only not in claim[0]:
            continue
        programs = {name: Program(arguments.build, name, arguments.device) for name, _ in filter(None, claim[1:3])}
        entries.append(result(claim, measure(programs, claim, arguments.pairs)))
        for program in programs.values():
            program.stop()
        lines.append(row(entries[-1]))
        print(lines[-1], flush=True)
    if arguments.write:
        pathlib.Path(arguments.write).write_text("\n".join(lines) + "\n")
    if arguments.json:
        machine = {"cpu": cpu_name(), "cores": os.cpu_count(), "device": arguments.device}
        found = {"format": 1, "program": "script/bench", "date": str(datetime.date.today()), "machine": machine, "ratios": entries}
        pathlib.Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
