"""The program as its users meet it: runs `snug` on small texts and looks at what it prints, writes and returns.

usage: cli_test.py PATH-OF-SNUG [unittest arguments]
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
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

    def snug(self, *arguments):
        return subprocess.run([SNUG, *map(str, arguments)], capture_output=True, text=True, errors="replace",
                              env=ENVIRONMENT, timeout=300)

    def train(self, out, *arguments):
        done = self.snug("train", "--data", self.text, "--out", self.folder / out, *SMALL, *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def records(self, out):
        lines = (self.folder / out / "log.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines[1:]]

    def losses(self, out):
        return [record["loss"] for record in self.records(out)]

    def refuses(self, status, *arguments, says):
        done = self.snug(*arguments)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
        for text in says:
            self.assertIn(text, done.stderr)


class Help(SnugTest):
    def test_is_as_recorded_and_fits_a_screen(self):
        for command in ("", "train", "sample", "report"):
            with self.subTest(command):
                shown = self.snug(*command.split(), "--help").stdout
                golden = GOLDEN / f"help_{command or 'snug'}.txt"
                if os.environ.get("SNUG_UPDATE_GOLDEN"):
                    golden.write_text(shown)
                self.assertEqual(shown, golden.read_text())
                self.assertLessEqual(len(shown.splitlines()), 40)


class Training(SnugTest):
    def test_writes_a_log_a_model_snapshots_and_a_report_and_samples(self):
        printed = self.train("run")
        self.assertIn("held-out loss", printed)
        run = self.folder / "run"
        self.assertEqual([r["step"] for r in self.records("run")], list(range(1, 9)))
        self.assertLess(self.losses("run")[-1], self.losses("run")[0])
        self.assertEqual(sorted(p.name for p in (run / "snapshots").iterdir()), ["step-00000004", "step-00000006", "step-00000008"])
        sampled = self.snug("sample", "--run", run, "--prompt", "Scene", "--count", "20")
        self.assertEqual(sampled.returncode, 0, sampled.stderr)
        self.assertTrue(sampled.stdout.startswith("Scene"))
        self.assertEqual(self.snug("report", "--run", run).returncode, 0)
        page = (run / "report.html").read_text()
        self.assertIn("<svg", page)
        self.assertIn("Scene", page)
        for outside in ("http://", "https://", "<script src", "@import"):
            self.assertNotIn(outside, page.replace("http://www.w3.org/2000/svg", ""))

    def test_checkpointing_gives_the_same_bits_and_less_memory(self):
        self.train("plain")
        self.train("blocks", "--checkpoint", "blocks")
        self.assertEqual(self.losses("plain"), self.losses("blocks"))
        peak = lambda out: max(r["activation_peak_bytes"] for r in self.records(out))
        self.assertLess(peak("blocks"), 0.7 * peak("plain"))

    def test_splits_give_the_same_losses_within_rounding(self):
        self.train("whole")
        for size in ("4", "1"):
            for checkpoint in ("none", "blocks"):
                out = f"split{size}{checkpoint}"
                self.train(out, "--micro-batch", size, "--checkpoint", checkpoint)
                for whole, split in zip(self.losses("whole"), self.losses(out)):
                    self.assertLess(abs(whole - split) / whole, 1e-5)
        self.train("accumulated", "--accumulate", "6")
        self.assertEqual(self.losses("accumulated"), self.losses("split1none"))

    def test_takes_several_files_and_folders(self):
        folder = self.folder / "texts"
        folder.mkdir()
        (folder / "a.txt").write_text(TEXT)
        self.train("two", "--data", folder)

    def test_compares_two_runs(self):
        self.train("a")
        self.train("b", "--checkpoint", "blocks")
        done = self.snug("report", "--run", self.folder / "a", "--against", self.folder / "b")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("largest relative difference of a step's loss: 0", done.stdout)


class Resuming(SnugTest):
    def same_but_times(self, one, other):
        strip = lambda out: [{k: v for k, v in r.items() if k not in TIMES} for r in self.records(out)]
        self.assertEqual(strip(one), strip(other))

    def model(self, out):
        return (self.folder / out / "model.safetensors").read_bytes()

    def killed(self, out, lines, *arguments):
        """Starts a run and kills it as soon as its log has that many lines."""
        log = self.folder / out / "log.jsonl"
        process = subprocess.Popen([SNUG, "train", "--data", self.text, "--out", self.folder / out, *SMALL, *arguments],
                                   stdout=subprocess.DEVNULL, env=ENVIRONMENT)
        while process.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < lines):
            time.sleep(0.002)
        process.kill()
        process.wait()

    def test_after_kill_9_at_any_moment_goes_on_to_the_same_bits(self):
        self.train("whole", "--checkpoint", "blocks", "--micro-batch", "4")
        for lines in (1, 2, 3, 4, 6, 7):
            with self.subTest(lines=lines):
                out = f"killed{lines}"
                self.killed(out, lines, "--checkpoint", "blocks", "--micro-batch", "4")
                done = self.snug("train", "--resume", "--out", self.folder / out)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.same_but_times("whole", out)
                self.assertEqual(self.model("whole"), self.model(out))

    def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(self):
        self.train("whole", "--steps", "200")
        arguments = [SNUG, "train", "--data", self.text, "--out", self.folder / "stopped", *SMALL, "--steps", "200"]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
        log = self.folder / "stopped" / "log.jsonl"
        while not log.exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 0)
        self.assertIn("snug train --resume --out", printed)
        self.assertLess(len(self.records("stopped")), 200)
        done = self.snug("train", "--resume", "--out", self.folder / "stopped")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.same_but_times("whole", "stopped")

    def test_refuses_other_settings(self):
        self.train("run")
        self.refuses(2, "train", "--resume", "--out", self.folder / "run", "--batch", "7", says=["batch = 6", "7"])

    def test_an_unreadable_snapshot_is_named(self):
        self.train("run")
        newest = self.folder / "run" / "snapshots" / "step-00000008"
        part = newest / "model.safetensors"
        part.write_bytes(part.read_bytes()[:1000])
        self.refuses(1, "train", "--resume", "--out", self.folder / "run", says=["step-00000008"])


class BadInput(SnugTest):
    def refuses_to_train(self, status, *arguments, says):
        out = self.folder / "new"
        self.refuses(status, "train", "--out", out, *arguments, says=says)
        self.assertFalse(out.exists())

    def test_is_refused_in_one_line_and_leaves_nothing_behind(self):
        data = ["--data", self.text]
        empty = self.folder / "empty.txt"
        empty.write_text("")
        self.refuses_to_train(2, says=["--data"])
        self.refuses_to_train(2, "--data", self.folder / "absent", says=["absent"])
        self.refuses_to_train(2, "--data", empty, says=["empty.txt"])
        self.refuses_to_train(2, *data, "--batch", "2", "--micro-batch", "3", says=["micro_batch 3", "batch 2"])
        self.refuses_to_train(2, *data, "--batch", "0", says=["batch is 0"])
        self.refuses_to_train(2, *data, "--micro-batch", "auto", says=["not there yet"])
        self.refuses_to_train(2, *data, "--micro-batch", "few", says=["few"])
        self.refuses_to_train(2, *data, "--batch", "6", "--accumulate", "4", says=["divide"])
        self.refuses_to_train(2, *data, "--checkpoint", "auto", says=["not there yet"])
        self.refuses_to_train(2, *data, "--checkpoint", "some", says=["some"])
        self.refuses_to_train(2, *data, "--model", "gpt-tinny", says=["gpt-tiny"])
        self.refuses_to_train(2, *data, "--precision", "float23", says=["float32"])
        self.refuses_to_train(2, *data, "--memory", "lots", says=["lots"])
        self.refuses_to_train(2, *data, "--lr", "nan", says=["lr"])
        self.refuses_to_train(2, *data, "--device", "abacus", says=["abacus"])

    def test_what_does_not_fit_exits_with_3_and_the_limit(self):
        data = ["--data", self.text]
        self.refuses_to_train(3, *data, "--memory", "1MiB", says=["1.00 MiB"])    # not even the parameters
        self.refuses_to_train(3, *data, "--memory", "20MiB", says=["20.00 MiB"])  # not the first step

    def test_a_run_folder_that_exists_is_not_touched(self):
        self.train("run")
        before = (self.folder / "run" / "log.jsonl").read_bytes()
        self.refuses(2, "train", "--data", self.text, "--out", self.folder / "run", says=["--resume", "--out"])
        self.assertEqual(before, (self.folder / "run" / "log.jsonl").read_bytes())
        self.refuses(2, "train", "--resume", "--out", self.folder / "absent", says=["absent"])

    def test_unknown_words_name_the_nearest_known_one(self):
        self.refuses(2, "train", "--dta", "x", says=["--dta", "--data"])
        self.refuses(2, "trian", says=["trian", "train"])
        self.refuses(2, "sample", "--temprature", "1", says=["--temperature"])
        self.refuses(2, "report", "--run", self.folder / "absent", says=["absent"])
        self.refuses(2, "sample", "--run", self.folder / "absent", says=["absent"])


if __name__ == "__main__":
    if SNUG is None:
        sys.exit(__doc__)
    unittest.main()
