#!/usr/bin/env python3
"""Tests tools/gpu_trial.py with steps that need neither torch nor a GPU.

usage: gpu_trial_test.py ROOT
"""

import contextlib
import importlib.util
import io
import json
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(sys.argv.pop(1)).resolve()
spec = importlib.util.spec_from_file_location("gpu_trial", ROOT / "tools/gpu_trial.py")
trial = importlib.util.module_from_spec(spec)
spec.loader.exec_module(trial)


def python(name, program, limit_s=60, **more):
    return trial.Step(name, f"about <{name}>", ["{python}", "-c", program], limit_s, **more)


class Trial(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.results = self.folder / "results"

    def run_steps(self, *steps, device="cpu"):
        """The exit status, and what was printed."""
        printed = io.StringIO()
        with mock.patch.multiple(trial, STEPS=list(steps), HERE=self.folder, libraries=lambda: []), \
                mock.patch.object(sys, "argv", ["run", str(self.results), "--device", device]), contextlib.redirect_stdout(printed):
            return trial.main(), printed.getvalue()

    def result(self, name):
        return json.loads((self.results / f"{name}.json").read_text())

    def test_writes_a_file_for_each_step_and_a_page_of_all(self):
        status, printed = self.run_steps(python("first", "print('<b>42')"), python("second", "pass"))
        self.assertEqual((status, printed), (0, "first: done\nsecond: done\n"))
        self.assertEqual(self.result("first")["output"], "<b>42\n")
        page = (self.results / "index.html").read_text()
        self.assertIn("&lt;b&gt;42", page)
        self.assertIn("about &lt;second&gt;", page)

    def test_goes_on_after_a_step_that_fails_and_says_so_at_the_end(self):
        status, printed = self.run_steps(python("bad", "raise SystemExit(3)"), python("good", "pass"))
        self.assertEqual((status, printed), (1, "bad: failed: it ended with status 3\ngood: done\n"))

    def test_a_step_for_several_gpus_needs_so_many(self):
        for found, expected in ((1, "skipped"), (2, "done")):
            with mock.patch.object(trial, "gpus", lambda found=found: found):
                self.run_steps(python(f"on{found}", "pass", gpus=2), device="cuda")
            self.assertEqual(self.result(f"on{found}")["status"], expected)

    def test_a_program_that_is_not_there_is_a_failure(self):
        absent = trial.Step("absent", "", ["tests/absent"], 60)
        status, printed = self.run_steps(absent)
        self.assertEqual(status, 1)
        self.assertIn("tests/absent", printed)

    def test_ends_a_step_that_runs_longer_than_its_limit_with_what_it_printed(self):
        status, printed = self.run_steps(python("endless", "import time; print('begun', flush=True); time.sleep(600)", limit_s=2))
        self.assertEqual((status, printed), (1, "endless: failed: it ran longer than 2 s\n"))
        self.assertEqual(self.result("endless")["output"], "begun\n")

    def test_goes_on_where_it_was_cut(self):
        count = python("count", "open('runs', 'a').write('x')")
        self.run_steps(count)
        (self.results / "later.json.part").write_text("{")  # as of a trial that was killed while it wrote
        status, _ = self.run_steps(count, python("later", "pass"))
        self.assertEqual((status, (self.folder / "runs").read_text(), self.result("later")["status"]), (0, "x", "done"))
        (self.results / "count.json").unlink()
        self.run_steps(count)
        self.assertEqual((self.folder / "runs").read_text(), "xx")

    def test_skips_what_cannot_run_and_says_why(self):
        no_cpu = python("no_cpu", "raise SystemExit(1)", on_cpu="it has no fans")
        no_program = python("no_program", "raise SystemExit(1)", needs="a-program-of-nobody")
        status, printed = self.run_steps(no_cpu, no_program)
        self.assertEqual((status, printed),
                         (0, "no_cpu: skipped: it has no fans\nno_program: skipped: a-program-of-nobody is not on PATH\n"))
        self.assertIn("it has no fans", (self.results / "index.html").read_text())

    def test_a_filter_that_matches_no_test_is_a_failure(self):
        status, printed = self.run_steps(python("tests", "print('[==========] Running 0 tests from 0 test suites.')"))
        self.assertEqual((status, printed), (1, "tests: failed: no test has such a name\n"))

    def test_gives_a_gpu_its_own_environment(self):
        step = python("environment", "import os; print(os.environ.get('SNUG_X'), '{device}')", gpu_environment={"SNUG_X": "there"})
        self.run_steps(step)
        self.assertEqual(self.result("environment")["output"], "None cpu\n")
        (self.results / "environment.json").unlink()
        self.run_steps(step, device="cuda")
        self.assertEqual(self.result("environment")["output"], "there cuda\n")


class Steps(unittest.TestCase):
    def test_take_at_most_21_minutes_together_on_one_gpu(self):
        self.assertLessEqual(sum(step.limit_s for step in trial.STEPS if step.gpus == 1), 21 * 60)

    def test_have_names_of_their_own_and_words_that_are_known(self):
        self.assertEqual(len({step.name for step in trial.STEPS}), len(trial.STEPS))
        for sizes in trial.SIZES.values():
            for step in trial.STEPS:
                for word in step.command:
                    word.format(device="", python="", scratch="", **sizes)

    def test_run_only_what_the_script_packs(self):
        script = (ROOT / "script/gpu-trial").read_text()
        for step in trial.STEPS:
            for word in step.command:
                folder, _, name = word.partition("/")
                if folder == "tests":
                    self.assertRegex(script, rf'tests=".*\b{name.removeprefix("test_")}\b')
                elif folder == "benchmarks" and not name.endswith(".py") and name != "peers":
                    self.assertRegex(script, rf'benchmarks=".*\b{name}\b')
                elif folder == "python":
                    self.assertRegex(script, rf'tests/python/.*\b{pathlib.Path(name).stem}\b')


if __name__ == "__main__":
    unittest.main()
