"""Command lines that nobody would type: options of each command with values of any kind. Each ends with a status of
docs/program.md, says in one line what is wrong, and shows bytes of unknown origin escaped.

usage: command_line_test.py PATH-OF-SNUG [unittest arguments]

SNUG_COMMAND_LINES=N tries N (default 60), always the same.
"""

import os
import random
import re
import subprocess

from program import ENVIRONMENT, SNUG, SnugTest, main

COMMANDS = ("train", "sample", "report", "snapshots", "formats", "plan", "compare", "launch", "trian")
VALUES = ("", "-1", "0", "1", "3", "0x10", "1e999", "-0.0", "nan", "inf", "99999999999999999999999", "2.5", "1KiB", "1EiB", "-1MiB", "auto", "gpt-tiny", "gpt-huge",
          "bfloat16", "low", "blocks", "cuda:9", "mps", "/", "/dev/null", ".", "\x1b[31mred", "a\nb", "\udcff\udcfe", "x" * 5000, "--", "-", "%s%n", "äöü",
          "model.pt2", "text.txt", "[1,2]", '{"a":1}')


class AnyCommandLine(SnugTest):
    def options(self, command):
        return re.findall(r"^  (?:-\w,)?(--[\w-]+)", self.snug(command, "--help").stdout, re.MULTILINE)

    def test_ends_with_a_status_that_is_told(self):
        draw = random.Random(1)
        (self.folder / "model.pt2").write_bytes(b"PK\5\6" + bytes(18))
        options = {command: self.options(command) for command in COMMANDS}
        self.assertGreater(len(options["train"]), 20)
        statuses = []
        for _ in range(int(os.environ.get("SNUG_COMMAND_LINES", "60"))):
            command = draw.choice(COMMANDS)
            words = [command]
            for _ in range(draw.randint(0, 4)):
                words.append(draw.choice(options[command] + ["--no-such-option"]) if draw.random() < 0.6 and options[command] else draw.choice(VALUES))
                if draw.random() < 0.7:
                    words.append(draw.choice(VALUES))
            if command in ("compare", "train"):  # what is right would run for minutes, and write where it is told
                words.append("--no-such-option")
            with self.subTest(words):
                done = subprocess.run([SNUG, *map(os.fsencode, words)], capture_output=True, cwd=self.folder, env=ENVIRONMENT,
                                      stdin=subprocess.DEVNULL, timeout=120)
                statuses.append(done.returncode)
                self.assertIn(done.returncode, (0, 1, 2, 3), done.stderr)
                if done.returncode != 0:
                    self.assertRegex(done.stderr, rb"\Asnug: [^\n]+\n\Z")
                self.assertNotRegex(done.stdout + done.stderr, rb"[\x00-\x08\x0b-\x1f\x7f]")
        self.assertIn(0, statuses)
        self.assertIn(2, statuses)


if __name__ == "__main__":
    main(__doc__)
