"""What the tests of the program share: the program itself, a text, and small runs on it."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SNUG = pathlib.Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else None
GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
# Waiting threads that spin make small runs many times slower on a busy machine.
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive", "COLUMNS": "120"}
TIMES = {"seconds", "items_per_second"}
TEXT = "".join(f"Scene {i}. Enter the {i * 7 % 13}th gentleman, speaking to {i * i % 29} ladies of the court.\n" for i in range(400))
SMALL = ["--batch", "6", "--steps", "8", "--snapshot-every", "2", "--validate-every", "4"]


class SnugTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.text = self.folder / "text.txt"
        self.text.write_text(TEXT)

    def snug(self, *arguments, **variables):
        return subprocess.run([SNUG, *map(str, arguments)], capture_output=True, text=True, errors="replace",
                              env={**ENVIRONMENT, **variables}, timeout=900)

    def train(self, out, *arguments):
        done = self.snug("train", "--data", self.text, "--out", f"{self.folder}/{out}", *SMALL, *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def logged(self, out):
        lines = (self.folder / out / "log.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines[1:]]

    def records(self, out):
        return [line for line in self.logged(out) if "event" not in line]

    def events(self, out, name):
        return [line for line in self.logged(out) if line.get("event") == name]

    def losses(self, out):
        return [record["loss"] for record in self.records(out)]

    def refuses(self, status, *arguments, says):
        done = self.snug(*arguments)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        for text in says:
            self.assertIn(text, done.stderr)


def main(usage):
    if SNUG is None:
        sys.exit(usage)
    unittest.main()
