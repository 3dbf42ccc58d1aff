"""examples/digits.cpp learns, and a run that was stopped in the middle of an epoch goes on to the same bits.

usage: digits_test.py PROGRAM
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

PROGRAM = sys.argv.pop(1)


class Digits(unittest.TestCase):
    def run_program(self, *arguments, status=0):
        done = subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=600)
        self.assertEqual(done.returncode, status, done.stderr)
        return done.stdout if status == 0 else done.stderr

    def test_learns_and_resumes_to_the_same_bits(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            whole = self.run_program("-", folder / "whole", 1000, 6).splitlines()
            self.assertEqual(whole[-1], "digits: done")
            accuracies = [float(line.split()[-1]) for line in whole if "held-out" in line]
            self.assertEqual(len(accuracies), 6)
            self.assertGreater(accuracies[-1], 0.9)
            # 6 steps an epoch; stopped after 13, whose snapshot is of step 10: four into the second epoch.
            self.run_program("-", folder / "cut", 13, 6)
            resumed = self.run_program("-", folder / "cut", 1000, 6).splitlines()
            self.assertEqual(resumed[0], "resumed after step 10")
            self.assertEqual(resumed[-2:], whole[-2:])
            self.assertEqual(resumed[1:], whole[-len(resumed) + 1:])

    def test_says_what_is_missing(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertIn("images-idx3-ubyte", self.run_program(folder, folder, status=1))
        self.assertIn("usage", self.run_program(status=2))


if __name__ == "__main__":
    unittest.main()
