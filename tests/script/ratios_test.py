"""The statistics of script/bench: intervals hold the truth as often as they say, verdicts follow from them, and a claim is measured in turns.

usage: ratios_test.py ROOT
"""

import json
import pathlib
import random
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1)).resolve()
sys.path.insert(0, str(ROOT / "benchmarks"))

import ratios  # noqa: E402
import run  # noqa: E402


def exactly(value):
    return {"median": value, "low": value, "high": value}


def between(low, high):
    return {"median": (low + high) / 2, "low": low, "high": high}


class Interval(unittest.TestCase):
    def test_holds_the_true_median_in_nine_of_ten_experiments_or_more(self):
        draw = random.Random(7)
        held = 0
        for _ in range(200):
            low, high = ratios.bootstrap_interval([draw.lognormvariate(0.1, 0.2) for _ in range(21)], resamples=400)
            held += low <= 2.718281828 ** 0.1 <= high
        self.assertGreaterEqual(held, 180)
        self.assertLess(held, 200, "an interval that is never wrong is too wide")

    def test_narrows_with_more_pairs(self):
        draw = random.Random(3)
        pairs = [draw.lognormvariate(0, 0.2) for _ in range(400)]
        width = [high - low for low, high in (ratios.bootstrap_interval(pairs[:n]) for n in (10, 400))]
        self.assertLess(width[1], width[0] / 3)

    def test_of_equal_ratios_is_that_ratio(self):
        self.assertEqual(ratios.bootstrap_interval([1.25] * 21), (1.25, 1.25))

    def test_is_the_same_at_every_call(self):
        pairs = [1.0, 1.3, 0.9, 1.1, 1.7]
        self.assertEqual(ratios.bootstrap_interval(pairs), ratios.bootstrap_interval(pairs))

    def test_is_not_moved_by_one_pair_that_was_disturbed(self):
        pairs = [1.0 + i / 1000 for i in range(21)]
        self.assertLess(ratios.bootstrap_interval(pairs[:-1] + [50.0])[1], 1.1)


class Verdict(unittest.TestCase):
    def test_is_of_the_whole_interval(self):
        for target, at_most, ratio, expected in ((1.1, False, between(1.2, 1.3), "met"), (1.1, False, between(1.0, 1.05), "missed"),
                                                 (1.1, False, between(1.0, 1.2), "cannot be told here"), (1.1, True, between(1.0, 1.05), "met"),
                                                 (1.1, True, between(1.2, 1.3), "missed"), (1.1, True, between(1.0, 1.2), "cannot be told here"),
                                                 (None, False, between(1.0, 1.2), None)):
            self.assertEqual(ratios.verdict(target, at_most, ratio, exactly(1.0)), expected)

    def test_is_withheld_where_the_same_program_differs_from_itself_as_much(self):
        for same in (between(0.8, 1.01), between(0.99, 1.25)):
            self.assertEqual(ratios.verdict(1.1, False, between(1.2, 1.3), same), "cannot be told here")
            self.assertEqual(ratios.verdict(1.1, True, between(1.2, 1.3), same), "cannot be told here")


class Counter:
    """A program whose case "slow" takes twice as long as "fast", both disturbed alike within a turn."""

    def __init__(self):
        self.calls, self.draw = [], random.Random(5)

    def run(self, case, repeats):
        if len(self.calls) % 3 == 1:
            self.load = self.draw.uniform(1, 3)
        self.calls.append(case)
        seconds = repeats * (2.0 if case == "slow" else 1.0) * getattr(self, "load", 1.0)
        return seconds, 2 * seconds


class Claim(unittest.TestCase):
    CLAIM = ("slow / fast", ("p", "slow"), ("p", "fast"), 5, 1.5)

    def test_is_measured_in_turns_of_another_order_each_time(self):
        program = Counter()
        run.measure({"p": program}, self.CLAIM, 4)
        turns = [tuple(program.calls[2 + 3 * i:5 + 3 * i]) for i in range(4)]
        self.assertEqual([sorted(turn) for turn in turns], [["fast", "fast", "slow"]] * 4)
        self.assertGreater(len(set(turns)), 1)

    def test_gives_medians_the_program_against_itself_and_a_verdict(self):
        turns = [[(2.0 * load, 2.2), (1.0 * load, 1.1), (1.01 * load, 1.1)] for load in (1, 3, 2, 1.5, 1.1)]
        entry = run.result(self.CLAIM, turns)
        self.assertAlmostEqual(entry["wall"]["median"], 2.0)
        self.assertAlmostEqual(entry["cpu"]["median"], 2.0)
        self.assertAlmostEqual(entry["same"]["median"], 1.01)
        self.assertEqual((entry["verdict"], entry["pairs"]), ("met", 5))
        cells = [cell.strip() for cell in run.row(entry).split("|")]
        self.assertEqual(cells[1:5] + [cells[8]], ["slow / fast", "2.00", "2.00 to 2.00", "at least 1.5", "met"])

    def test_of_seconds_has_no_ratio_but_a_verdict(self):
        entry = run.result(("seconds", ("p", "slow"), None, 1, run.AtMost(1)), [[(2.0, 2.0), (2.1, 2.0)]] * 3)
        self.assertEqual((entry["wall"]["median"], entry["cpu"], entry["verdict"]), (2.0, None, "missed"))

    def test_names_are_unique_and_there_are_21_turns_if_nothing_is_said(self):
        names = [claim[0] for claim in run.CLAIMS]
        self.assertEqual(len(names), len(set(names)))
        self.assertIn('"--pairs", type=int, default=21', (ROOT / "benchmarks/run.py").read_text())


class File(unittest.TestCase):
    PROGRAM = """#!/usr/bin/env python3
import sys
print("ready", flush=True)
for line in sys.stdin:
    name, repeats = line.split()
    print(int(repeats) * (3.0 if "unscale" in name else 1.0), flush=True)
"""

    def test_has_every_claim_that_was_asked_for(self):
        with tempfile.TemporaryDirectory() as folder:
            build = pathlib.Path(folder)
            (build / "benchmarks/peers").mkdir(parents=True)
            for name in ("optimizers", "peers/optimizers"):
                (build / "benchmarks" / name).write_text(self.PROGRAM)
                (build / "benchmarks" / name).chmod(0o755)
            subprocess.run([sys.executable, ROOT / "benchmarks/run.py", build, "--pairs", "3", "--only", "10.8 M: AdamW step: torch", "--json", build / "x.json"],
                           check=True, capture_output=True, timeout=120)
            found = json.loads((build / "x.json").read_text())
        self.assertEqual((found["format"], found["program"], len(found["ratios"])), (1, "script/bench", 1))
        entry = found["ratios"][0]
        self.assertEqual((entry["pairs"], entry["wall"]["median"], entry["same"]["median"], entry["verdict"]), (3, 1.0, 1.0, "missed"))


if __name__ == "__main__":
    unittest.main()
