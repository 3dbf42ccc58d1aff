"""What snug train writes for TensorBoard, read by TensorBoard.

usage: tensorboard_test.py PATH-OF-SNUG [unittest arguments]
"""

import shutil
import struct
import subprocess
import sys
import time

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(77)

from program import ENVIRONMENT, SMALL, SNUG, SnugTest, main

KEYS = {"loss/training": "loss", "loss/held_out": "validation_loss", "training/learning_rate": "learning_rate",
        "training/gradient_norm": "grad_norm", "training/loss_scale": "loss_scale", "training/items": "items",
        "training/micro_batches": "micro_batches", "bytes/peak": "peak_bytes",
        "bytes/activation_peak": "activation_peak_bytes", "speed/seconds": "seconds",
        "speed/items_per_second": "items_per_second"}


def single(value):
    return struct.unpack("f", struct.pack("f", value))[0]


class TensorBoard(SnugTest):
    def setUp(self):
        super().setUp()
        self.boards = self.folder / "boards"

    def scalars(self):
        board = EventAccumulator(str(self.boards))
        board.Reload()
        return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}

    def check(self, out):
        """The board has the numbers of the log, each once."""
        scalars = self.scalars()
        records = self.records(out)
        for tag, key in KEYS.items():
            expected = [(record["step"], single(record[key])) for record in records if key in record]
            self.assertEqual(scalars[tag], expected, tag)
        for category in ("parameters", "gradients", "optimizer_state", "activations", "workspace", "other"):
            expected = [(record["step"], single(record["memory"][category])) for record in records]
            self.assertEqual(scalars[f"bytes/{category}"], expected, category)

    def test_shows_the_numbers_of_the_log(self):
        self.train("run", "--tensorboard", self.boards)
        self.check("run")
        self.assertEqual(len(self.scalars()["loss/held_out"]), 2)

    def test_is_readable_after_a_kill_and_goes_on_with_the_resumed_run(self):
        command = [SNUG, "train", "--data", self.text, "--out", self.folder / "run", *SMALL, "--tensorboard", self.boards]
        log = self.folder / "run" / "log.jsonl"
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT) as process:
            while process.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") >= 6):
                time.sleep(0.002)
            process.kill()
        steps = [step for step, _ in self.scalars()["loss/training"]]
        self.assertEqual(steps, list(range(1, len(steps) + 1)))
        self.assertGreaterEqual(len(steps), 3)
        done = self.snug("train", "--resume", "--out", self.folder / "run", "--tensorboard", self.boards)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(list(self.boards.iterdir())), 2)
        self.check("run")

    def test_has_checksums_that_notice_a_changed_bit(self):
        self.train("run", "--tensorboard", self.boards)
        file = next(self.boards.iterdir())
        events = lambda: len(list(RawEventFileLoader(str(file)).Load()))
        self.assertEqual(events(), 10)  # a version, a start, 8 steps
        whole = file.read_bytes()
        file.write_bytes(whole[:-10] + bytes([whole[-10] ^ 1]) + whole[-9:])
        self.assertLess(events(), 10)

    def test_a_full_disk_ends_the_board_and_not_the_run(self):
        self.boards.mkdir()
        kept = self.folder / "kept"
        # A disk of a single page, which only this process sees.
        inside = ["unshare", "-Urm", "sh", "-c",
                  'kept="$1"; shift; mount -t tmpfs -o size=4k tmpfs "$0" && "$@" && cp -r "$0" "$kept"']
        if shutil.which("unshare") is None or subprocess.run([*inside, self.boards, self.folder / "probe", "true"],
                                                             capture_output=True).returncode != 0:
            self.skipTest("no disk can be mounted here")
        done = subprocess.run([*inside, self.boards, kept, SNUG, "train", "--data", self.text, "--out", self.folder / "run",
                               "--batch", "6", "--steps", "16", "--tensorboard", self.boards],
                              capture_output=True, text=True, env=ENVIRONMENT)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stdout.count("goes on without TensorBoard"), 1, done.stdout)
        self.assertEqual(len(self.records("run")), 16)
        self.boards = kept
        steps = [step for step, _ in self.scalars()["loss/training"]]
        self.assertEqual(steps, list(range(1, len(steps) + 1)))
        self.assertTrue(0 < len(steps) < 16, steps)

    def test_a_folder_that_cannot_be_made_is_one_clear_error(self):
        self.refuses(1, "train", "--data", self.text, "--out", self.folder / "run", *SMALL, "--tensorboard", self.text,
                     says=[str(self.text)])
        self.assertFalse((self.folder / "run").exists())


if __name__ == "__main__":
    main(__doc__)
