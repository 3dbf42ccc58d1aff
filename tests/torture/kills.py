"""Kills programs with -9 at random moments, goes on, and compares with a run that nobody killed.

Training is killed, and so is its first resumption; the second one has to end with the weights, the log and the files of the undisturbed
run. On two ranks one of them is killed, and the launcher has to end the other. A report that is killed leaves the old page or the new one.

usage: kills.py PATH-OF-SNUG FAULTS.so [--kills N] [--seed N] [--only REGEX] [--table FILE]

  --only REGEX  only the kinds that it finds
  --kills N     so many of each kind (default 4)
  --table FILE  writes a table of what was tried, in Markdown
"""

import argparse
import collections
import contextlib
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "cli"))
from program import ENVIRONMENT, SNUG, TEXT  # noqa: E402 (takes the program from the arguments)
from torture import RUNS, SMALL, Torture, Wrong  # noqa: E402

CLOCK_SET_BACK = "the clock is set back by a day in the run and in its resumption"


class Killer:
    def __init__(self, faults, folder, text, chooser):
        self.torture, self.faults, self.text, self.chooser = Torture(faults, folder, text), faults, text, chooser
        self.folder = folder

    def new(self, flags):
        return ["--data", self.text, *SMALL, *flags]

    @contextlib.contextmanager
    def started(self, command, environment=None):
        """A program that ends, with all that it started, where what is done with it fails."""
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
                                   env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", **(environment or {})})
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def expect(self, status, *allowed):
        if status not in allowed:
            raise Wrong(f"ended with {status}")

    def killed(self, command, longest):
        """Whether the program was still running when it was killed, at a random moment within so many seconds."""
        with self.started(command) as process:
            time.sleep(self.chooser.uniform(0, longest))
            process.kill()
            status = process.wait()
        self.expect(status, 0, -signal.SIGKILL)
        return status != 0

    def train(self, out, flags):
        """The command that begins the run, or goes on with it."""
        is_there = (out / "log.jsonl").exists()
        return [SNUG, "train", *(["--resume"] if is_there else self.new(flags)), "--out", out]

    def timed(self, command):
        begin = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"})
        if done.returncode != 0:
            raise Wrong(f"ended with {done.returncode}: {done.stderr}")
        return time.monotonic() - begin

    def compare(self, out, expected):
        found = self.torture.result(out)
        for key, value in expected.items():
            if found[key] != value:
                raise Wrong(f"other {key}" + ("" if key == "weights" else f": {found[key]} instead of {value}"))

    def training(self, flags, kills):
        """Kills a run and its resumption; yields what became of each kill."""
        whole = self.folder / "whole"
        longest = self.timed(self.train(whole, flags))
        expected = self.torture.result(whole)
        for trial in range((kills + 1) // 2):
            out = self.folder / f"run{trial}"
            for _ in range(min(2, kills - 2 * trial)):
                yield "killed" if self.killed(self.train(out, flags), longest) else "ended before"
            self.timed(self.train(out, flags))
            self.compare(out, expected)

    def one_of_the_ranks(self, kills, flags, ranks=2):
        launch = lambda out: [SNUG, "launch", "-n", str(ranks), "--", *self.train(out, flags)]
        whole = self.folder / "whole"
        longest = self.timed(launch(whole))
        expected = self.torture.result(whole)
        for trial in range(kills):
            out = self.folder / f"run{trial}"
            with self.started(launch(out)) as launcher:
                time.sleep(self.chooser.uniform(0.1, longest))
                children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
                for child in self.chooser.sample(children, min(1, len(children))):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(child), signal.SIGKILL)
                status = launcher.wait(timeout=120)
            self.expect(status, *((0, 1) if children else (0,)))
            if status == 0:  # every rank had done its work
                self.compare(out, expected)
            yield "killed" if status == 1 else "ended before"
            self.timed(launch(out))
            self.compare(out, expected)

    def report(self, kills):
        out = self.folder / "run"
        self.timed(self.train(out, []))
        command = [SNUG, "report", "--run", out]
        longest = self.timed(command)
        page = (out / "report.html").read_bytes()
        for _ in range(kills):
            yield "killed" if self.killed(command, longest) else "ended before"
            if (out / "report.html").read_bytes() != page:
                raise Wrong("another page")
            self.timed(command)
        self.timed(self.train(out, []))  # a resumption removes the rest of a kill
        left = [path.name for path in out.iterdir() if ".tmp" in path.name]
        if left:
            raise Wrong(f"left behind: {left}")

    def clock(self, times):
        whole = self.folder / "whole"
        self.timed([*self.train(whole, []), "--tensorboard", whole / "board"])  # which writes the time of day
        expected = self.torture.result(whole)
        del expected["files"]  # Ctrl-C leaves a snapshot, and the board's file has the time in its name
        told = self.folder / "told"
        back = {"LD_PRELOAD": str(self.faults), "SNUG_FAULT_CLOCK_BACK": "86400", "SNUG_FAULT_CLOCK_TOLD": str(told)}
        for trial in range(times):
            out = self.folder / f"run{trial}"
            with self.started([*self.train(out, []), "--tensorboard", out / "board"], back) as process:
                while not (out / "snapshots" / "step-00000002").exists() and process.poll() is None:
                    time.sleep(0.01)
                process.send_signal(signal.SIGINT)
                self.expect(process.wait(timeout=120), 0, 128 + signal.SIGINT)
            self.expect_set_back(told)
            with self.started([*self.train(out, []), "--tensorboard", out / "board"], back) as process:
                self.expect(process.wait(timeout=600), 0)
            self.compare(out, expected)
            yield "equal"

    def expect_set_back(self, told):
        """The program has asked for the time before it was set back and after."""
        if not told.exists() or int(told.read_text()) < 1:
            raise Wrong("the clock was not asked after it was set back")
        told.unlink()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", type=pathlib.Path)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="kinds that this regular expression finds")
    parser.add_argument("--table", type=pathlib.Path)
    arguments = parser.parse_args()
    kinds = {f"training, {name}, and its resumption are killed": lambda killer, flags=flags: killer.training(flags, arguments.kills)
             for name, flags in RUNS.items()}
    kinds |= {"one rank of two is killed": lambda killer: killer.one_of_the_ranks(arguments.kills, ["--batch", "4"]),
              "one rank of two, with weights in shards, is killed":
                  lambda killer: killer.one_of_the_ranks(arguments.kills, ["--batch", "4", "--micro-batch", "1", "--memory", "11MiB"]),
              "one rank of four, with weights in shards in two groups, is killed":
                  lambda killer: killer.one_of_the_ranks(arguments.kills, ["--batch", "4", "--micro-batch", "1", "--memory", "11MiB",
                                                                           "--shard-group", "2"], ranks=4),
              "snug report is killed": lambda killer: killer.report(arguments.kills),
              CLOCK_SET_BACK: lambda killer: killer.clock((arguments.kills + 9) // 10)}
    rows, wrong = [], 0
    for number, (kind, trials) in enumerate(kinds.items()):
        if not re.search(arguments.only, kind):
            continue
        became = collections.Counter()
        with tempfile.TemporaryDirectory() as base:
            folder = pathlib.Path(base).resolve()
            text = folder / "text.txt"
            text.write_text(TEXT)
            try:
                for result in trials(Killer(arguments.faults.resolve(), folder, text, random.Random(f"{arguments.seed} {number}"))):
                    became[result] += 1
            except (Wrong, OSError, subprocess.TimeoutExpired) as error:
                wrong += 1
                became["WRONG"] += 1
                print(f"{kind}: {error}", flush=True)
        rows.append((kind, sum(became.values()), ", ".join(f"{what}: {count}" for what, count in sorted(became.items()))))
        print(*rows[-1], sep=" | ", flush=True)
    if not rows:
        sys.exit(f"kills: no kind has {arguments.only!r} in its name")
    if arguments.table:
        lines = ["| what | times | then |", "|---|---|---|"]
        arguments.table.write_text("\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)]) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
