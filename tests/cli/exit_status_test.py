"""Provokes each exit status of docs/exit-status.md.

usage: exit_status_test.py PATH-OF-SNUG [unittest arguments]
"""

import pathlib
import re
import signal
import subprocess
import time

from program import ENVIRONMENT, SMALL, SNUG, SnugTest, main

DOCUMENT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "exit-status.md"


class ExitStatus(SnugTest):
    def signalled(self, number):
        """A long run that gets a signal after its first snapshot."""
        run = self.folder / f"run{int(number)}"
        arguments = ["--data", self.text, "--out", run, *SMALL, "--steps", "1000000"]
        with subprocess.Popen([SNUG, "train", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              env=ENVIRONMENT) as training:
            deadline = time.monotonic() + 120
            while not list(run.glob("**/step-*/manifest.json")) and training.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            training.send_signal(number)
            training.wait(timeout=120)
        return training.returncode

    def failed(self, *arguments):
        """The status of a command that says in one line why it failed."""
        done = self.snug(*arguments)
        self.assertRegex(done.stderr, r"\Asnug: [^\n]+\n\Z")
        return done.returncode

    def provoke(self):
        """The provoked status by the documented one."""
        return {
            0: self.snug("--version").returncode,
            1: self.failed("launch", "-n", "1", "--", "false"),
            2: self.failed("train", "--no-such-option"),
            3: self.failed("train", "--data", self.text, "--out", self.folder / "none", *SMALL, "--memory", "1MiB"),
            130: self.signalled(signal.SIGINT),
            143: self.signalled(signal.SIGTERM),
        }

    def test_each_status_of_the_document_is_provoked(self):
        documented = [int(status) for status in re.findall(r"^\| (\d+) \|", DOCUMENT.read_text(), re.MULTILINE)]
        provoked = self.provoke()
        self.assertEqual(documented, list(provoked))
        self.assertEqual({status: status for status in documented}, provoked)

    def test_a_killed_run_ends_by_the_signal(self):
        self.assertEqual(self.signalled(signal.SIGKILL), -signal.SIGKILL)

    def test_a_launcher_says_the_status_of_a_program_that_is_not_there(self):
        done = self.snug("launch", "-n", "1", "--", "/no/such/program")
        self.assertEqual(done.returncode, 1)
        self.assertIn("status 127", done.stderr)


if __name__ == "__main__":
    main(__doc__)
