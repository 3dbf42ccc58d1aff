"""Provokes each exit status of docs/program.md.

usage: exit_status_test.py PATH-OF-SNUG [unittest arguments]
"""

import json
import os
import pathlib
import re
import signal
import subprocess
import time

from program import ENVIRONMENT, SMALL, SNUG, SnugTest, main

DOCUMENT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "program.md"


def newest_snapshot(run):
    """A folder of this name is whole. It may be gone a moment later."""
    names = os.listdir(run / "snapshots") if (run / "snapshots").exists() else []
    return max((int(name.removeprefix("step-")) for name in names if re.fullmatch(r"step-\d+", name)), default=0)


class ExitStatus(SnugTest):
    def signalled(self, number, run, *arguments):
        """The status of training that gets a signal after the next snapshot."""
        before = newest_snapshot(run)
        with subprocess.Popen([SNUG, "train", "--out", run, *arguments], stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL, env=ENVIRONMENT) as training:
            try:
                deadline = time.monotonic() + 120
                while newest_snapshot(run) == before and training.poll() is None and time.monotonic() < deadline:
                    time.sleep(0.05)
                training.send_signal(number)
                return training.wait(timeout=120)
            finally:
                training.kill()

    def long_run(self, number):
        """A run without end that gets a signal: its status and folder."""
        run = self.folder / f"run{int(number)}"
        return self.signalled(number, run, "--data", self.text, *SMALL, "--steps", "1000000"), run

    def saved_when_signalled(self, number):
        """The status of a run that saved a snapshot of its last step."""
        status, run = self.long_run(number)
        steps = [json.loads(line).get("step", 0) for line in (run / "log.jsonl").read_text().splitlines()]
        self.assertEqual(newest_snapshot(run), max(steps))
        return status

    def failed(self, *arguments):
        """The status of a command that says in one line why it failed."""
        done = self.snug(*arguments)
        self.assertRegex(done.stderr, r"\Asnug: [^\n]+\n\Z")
        return done.returncode

    def damaged(self):
        """The status of `snug snapshots` where one is damaged."""
        self.train("damaged", "--steps", "2")
        run = self.folder / "damaged"
        weights = next(run.glob("**/step-*/*.safetensors"))
        weights.write_bytes(weights.read_bytes()[:-1])
        return self.failed("snapshots", run)

    def provoke(self):
        """The provoked status by the documented one."""
        return {
            0: self.snug("--version").returncode,
            1: self.damaged(),
            2: self.failed("train", "--no-such-option"),
            3: self.failed("train", "--data", self.text, "--out", self.folder / "none", *SMALL, "--memory", "1MiB"),
            129: self.saved_when_signalled(signal.SIGHUP),
            130: self.saved_when_signalled(signal.SIGINT),
            143: self.saved_when_signalled(signal.SIGTERM),
        }

    def test_each_status_of_the_document_is_provoked(self):
        documented = [int(status) for status in re.findall(r"^\| (\d+) \|", DOCUMENT.read_text(), re.MULTILINE)]
        provoked = self.provoke()
        self.assertEqual(documented, list(provoked))
        self.assertEqual({status: status for status in documented}, provoked)

    def test_a_killed_run_ends_by_the_signal_and_goes_on(self):
        status, run = self.long_run(signal.SIGKILL)
        self.assertEqual(status, -signal.SIGKILL)
        newest = newest_snapshot(run)
        self.assertEqual(self.signalled(signal.SIGINT, run, "--resume"), 130)
        self.assertGreater(newest_snapshot(run), newest)

    def test_a_launcher_says_which_rank_failed_and_how(self):
        for status, program in {1: "false", 127: "/no/such/program"}.items():
            done = self.snug("launch", "-n", "1", "--", program)
            self.assertEqual(done.returncode, 1)
            self.assertIn(f"rank 0 ended with status {status}", done.stderr)


if __name__ == "__main__":
    main(__doc__)
