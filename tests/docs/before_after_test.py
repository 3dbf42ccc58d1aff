"""examples/before_after: an ordinary LibTorch program runs out of memory; the same with nine lines changed does not.

Memory is limited by the operating system, in the same way for both: `ulimit -d`, which counts all that a process may write to.
That includes the gaps between blocks in the heap of the C library. They differ from run to run and reach hundreds of MiB.
MALLOC_MMAP_THRESHOLD_ gives each block of 1 MiB or more its own mapping, without gaps.

usage: before_after_test.py PATH-OF-BEFORE PATH-OF-AFTER [unittest arguments]
"""

import difflib
import functools
import os
import pathlib
import re
import resource
import subprocess
import sys
import unittest

BEFORE, AFTER = pathlib.Path(sys.argv.pop(1)).resolve(), pathlib.Path(sys.argv.pop(1)).resolve()
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
LIMIT = 680000 * 2**10
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2", "MALLOC_MMAP_THRESHOLD_": str(2**20)}


@functools.cache
def run(program, limit=None):
    def set_limit():
        if limit:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    return subprocess.run([program, "2"], capture_output=True, text=True, env=ENVIRONMENT, preexec_fn=set_limit, timeout=600)


def loss(done):
    return float(re.search(r"step 2  loss ([\d.]+)", done.stdout)[1])


def changed_lines():
    """Lines that before.cpp has and after.cpp has not, and those that it has instead; without the comment that each begins with."""
    texts = [(ROOT / "examples" / "before_after" / name).read_text() for name in ("before.cpp", "after.cpp")]
    lines = [text[text.index("#include"):].splitlines() for text in texts]
    changes = [line for line in difflib.ndiff(*lines) if line[0] in "-+"]
    return [line[2:] for line in changes if line[0] == "-"], [line[2:] for line in changes if line[0] == "+"]


class BeforeAfter(unittest.TestCase):
    def test_before_runs_out_of_memory_where_after_trains(self):
        before, after = run(BEFORE, LIMIT), run(AFTER, LIMIT)
        self.assertNotEqual(before.returncode, 0)
        self.assertIn("allocate memory", before.stderr)
        self.assertEqual(after.returncode, 0, after.stderr)

    def test_its_losses_are_those_that_before_has_where_there_is_enough(self):
        before, after = run(BEFORE), run(AFTER, LIMIT)
        self.assertEqual((before.returncode, after.returncode), (0, 0), before.stderr + after.stderr)
        self.assertAlmostEqual(loss(before), loss(after), delta=1e-3 * loss(before))

    def test_no_more_than_ten_lines_are_changed(self):
        removed, added = changed_lines()
        self.assertLessEqual(max(len(removed), len(added)), 10)
        self.assertGreater(len(added), 0)

    def test_the_ordinary_program_is_about_150_lines_and_knows_nothing_of_snug(self):
        text = (ROOT / "examples" / "before_after" / "before.cpp").read_text()
        self.assertIn(len(text.splitlines()), range(120, 161))
        self.assertNotIn("snug", text)

    def test_the_page_shows_the_lines_that_are_changed(self):
        shown = re.search(r"```diff\n(.*?)```", (ROOT / "docs" / "start.md").read_text(), re.DOTALL)[1].splitlines()
        removed, added = changed_lines()
        self.assertEqual([line[1:] for line in shown if line[0] == "-"], removed)
        self.assertEqual([line[1:] for line in shown if line[0] == "+"], added)


if __name__ == "__main__":
    unittest.main()
