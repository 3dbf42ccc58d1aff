"""Makes every operation of a training run go wrong once, goes on, and compares with a run in which nothing did.

A run of `snug train` writes, opens, syncs, renames and reads files, and allocates tensors. For each of these operations, one by one:
it fails; or the disk is full from it on until the run ends; or the process is killed at it (a write after half of its bytes). Then the
run is resumed, or begun again where there was nothing yet. Its weights and its log must have the bits of the undisturbed run, its folder
the same files, and a run that failed must have said why in one line.

usage: torture.py PATH-OF-SNUG FAULTS.so [--say] [--sample N] [--seed N] [--only REGEX] [--table FILE]

  --say         prints what each run said
  --sample N    only N operations of each kind, chosen by the seed
  --table FILE  writes a table of what was tried, in Markdown
"""

import argparse
import collections
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from program import ENVIRONMENT, SNUG, TEXT  # noqa: E402 (takes the program from the arguments)

NUMBERS = ("step", "loss", "learning_rate", "grad_norm", "validation_loss")  # of a record; bytes depend on the plan, and plans on times
SMALL = ["--batch", "4", "--steps", "4", "--snapshot-every", "2", "--validate-every", "2"]
RUNS = {
    "plain": [],
    "with --async-snapshots": ["--async-snapshots"],
    "in a budget, with offload": ["--memory", "17MiB", "--micro-batch", "2", "--offload"],
    "the optimizer's state in a file": ["--memory", "11MiB", "--micro-batch", "2", "--offload"],
    "weights, gradients and state in files": ["--memory", "7MiB", "--micro-batch", "2", "--offload"],
}
FAULTS = {  # kind of fault, and of what
    "fails": ("fail", "files"),
    "takes half of the bytes": ("short", "files"),
    "finds a file system without O_TMPFILE": ("named", "files"),
    "and all writes after it find the disk full": ("full", "files"),
    "is the last before kill -9": ("kill", "files"),
    "gets no memory": ("fail", "memory"),
}
UNNOTICED = ("short", "named")


class Wrong(Exception):
    pass


class Torture:
    def __init__(self, faults, folder, text):
        self.faults, self.folder, self.text, self.said = faults, folder, text, ""

    def run(self, out, arguments, at=0, kind="", of="files", tell=""):
        environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
        if kind:
            environment |= {"LD_PRELOAD": str(self.faults), "SNUG_FAULT_UNDER": str(self.folder), "SNUG_FAULT_KIND": kind,
                            "SNUG_FAULT_OF": of, "SNUG_FAULT_AT": str(at), "SNUG_FAULT_COUNT": str(tell)}
        return subprocess.run([SNUG, "train", *arguments, "--out", out], capture_output=True, text=True, errors="replace", env=environment,
                              timeout=600)

    def new(self, out, arguments, **fault):
        return self.run(out, ["--data", self.text, *SMALL, *arguments], **fault)

    def operations(self, arguments, of):
        """The names of all operations of an undisturbed run, in their order."""
        with tempfile.TemporaryDirectory() as elsewhere, tempfile.TemporaryDirectory(dir=self.folder) as folder:
            names = pathlib.Path(elsewhere, "names")
            done = self.new(pathlib.Path(folder, "run"), arguments, kind="count", of=of, tell=names)
            if done.returncode != 0:
                raise Wrong(f"the undisturbed run ended with {done.returncode}: {done.stderr}")
            return names.read_text().split()

    def result(self, out):
        """What has to be equal: weights, numbers of the log, names of files."""
        lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()[1:]]
        log = [{key: line.get(key) for key in NUMBERS} for line in lines if "event" not in line]
        files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if not path.is_relative_to(out / "plans"))
        return {"weights": (out / "model.safetensors").read_bytes(), "log": log, "files": files}

    def try_one(self, arguments, expected, at, kind, of):
        """What became of it, in a word or two. Throws Wrong."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            out = pathlib.Path(folder, "run")
            done = self.new(out, arguments, at=at, kind=kind, of=of)
            self.said = done.stderr.strip()
            became = "not noticed" if done.returncode == 0 else "killed" if done.returncode == -9 else "refused, and gone on"
            if kind in UNNOTICED and done.returncode != 0:
                raise Wrong(f"ended with {done.returncode} and said: {done.stderr}")
            if done.returncode not in (0, -9) and (len(done.stderr.strip().splitlines()) != 1 or not done.stderr.startswith("snug: ")):
                raise Wrong(f"ended with {done.returncode} and said: {done.stderr or done.stdout}")
            if done.returncode != 0:
                again = self.run(out, ["--resume"])
                if again.returncode == 2 and "no run" in again.stderr:
                    again = self.new(out, arguments)
                if again.returncode != 0:
                    raise Wrong(f"after {done.stderr!r} going on ended with {again.returncode}: {again.stderr}")
            found = self.result(out)
            for key, value in expected.items():
                if found[key] != value:
                    shown = "" if key == "weights" else f": {found[key]} instead of {value}"
                    raise Wrong(f"other {key} ({became}; {done.stderr.strip()}){shown}")
            return became


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults")
    parser.add_argument("--say", action="store_true")
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="runs and faults whose 'run: fault' this regular expression finds")
    parser.add_argument("--table", type=pathlib.Path)
    arguments = parser.parse_args()
    chooser, rows, wrong = random.Random(arguments.seed), [], 0
    with tempfile.TemporaryDirectory() as base:
        folder = pathlib.Path(base).resolve()
        text = folder / "text.txt"
        text.write_text(TEXT)
        torture = Torture(pathlib.Path(arguments.faults).resolve(), folder, text)
        for run, flags in RUNS.items():
            whole = folder / "whole" / "run"
            done = torture.new(whole, flags)
            if done.returncode != 0:
                sys.exit(f"torture: the undisturbed run ended with {done.returncode}: {done.stderr}")
            expected = torture.result(whole)
            for fault, (kind, of) in FAULTS.items():
                if not re.search(arguments.only, f"{run}: {fault}"):
                    continue
                names = torture.operations(flags, of)
                if kind in UNNOTICED:
                    numbers = [1]  # from the first on
                else:
                    numbers = range(1, len(names) + 1)
                    if arguments.sample and arguments.sample < len(names):
                        numbers = sorted(chooser.sample(numbers, arguments.sample))
                became = collections.Counter()
                for at in numbers:
                    try:
                        became[torture.try_one(flags, expected, at, kind, of)] += 1
                        if arguments.say:
                            print(f"  {at} {names[at - 1]}: {torture.said}", flush=True)
                    except (Wrong, subprocess.TimeoutExpired, OSError) as error:
                        wrong += 1
                        became["WRONG"] += 1
                        print(f"{run}: operation {at} of {len(names)}, '{names[at - 1]}', {fault}: {error}", flush=True)
                rows.append((run, fault, len(names), len(numbers), ", ".join(f"{what}: {count}" for what, count in sorted(became.items()))))
                print(*rows[-1], sep=" | ", flush=True)
            subprocess.run(["rm", "-r", folder / "whole"], check=True)
    if arguments.table:
        lines = ["| run | each operation on its files, one by one, | operations | tried | then |", "|---|---|---|---|---|"]
        arguments.table.write_text("\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
