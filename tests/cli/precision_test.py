"""snug train with 16-bit weights, precision guard, learning-rate rules and gradient statistics.

usage: precision_test.py PATH-OF-SNUG [unittest arguments]
"""

import json
import struct

from program import SnugTest, main


def safetensors_dtypes(path):
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    return {entry["dtype"] for name, entry in header.items() if name != "__metadata__"}


class Precision(SnugTest):
    def test_low_weights_train_as_full_ones_do_save_fp32_and_take_less_for_weights(self):
        self.train("full")
        self.train("low", "--precision", "bfloat16", "--weights", "low")
        full, low = self.losses("full"), self.losses("low")
        for a, b in zip(full, low):
            self.assertLess(abs(a - b) / a, 0.02)  # BF16 has 8 bits
        self.assertNotEqual(full, low)
        self.assertLess(low[-1], low[0])
        self.assertEqual(safetensors_dtypes(self.folder / "low" / "model.safetensors"), {"F32"})

    def test_low_weights_resume_to_the_bit(self):
        flags = ["--precision", "bfloat16", "--weights", "low"]
        self.train("whole", *flags)
        self.train("parts", *flags)
        run = self.folder / "parts"
        (run / "snapshots").is_dir() or self.fail("no snapshots")
        newest = max((run / "snapshots").iterdir(), key=lambda path: path.name)
        for file in sorted(newest.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        newest.rmdir() if newest.is_dir() else None
        done = self.snug("train", "--resume", "--out", run)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.losses("whole"), self.losses("parts"))
        self.assertEqual((self.folder / "whole" / "model.safetensors").read_bytes(), (run / "model.safetensors").read_bytes())

    def test_learning_rate_rules_follow_the_batch(self):
        rates = {}
        for rule in ("none", "linear", "sqrt"):
            self.train(rule, "--lr", "0.0064", "--lr-scaling", rule, "--steps", "1", "--warmup", "0", "--batch", "4")
            rates[rule] = self.records(rule)[0]["learning_rate"]
        self.assertAlmostEqual(rates["none"], 0.0064)
        self.assertAlmostEqual(rates["linear"], 0.0064 * 4 / 64)
        self.assertAlmostEqual(rates["sqrt"], 0.0064 * (4 / 64) ** 0.5)

    def test_gradient_statistics_are_logged_and_drawn(self):
        self.train("run", "--gradient-statistics", "4")
        samples = self.events("run", "gradients")
        self.assertEqual({s["step"] for s in samples}, {4, 8})
        for sample in samples:
            counted = sum(map(int, sample["exponents"].split())) + sample["zeros"] + sample["non_finite"]
            self.assertEqual(counted, sample["elements"], sample["parameter"])
        self.assertIn("Sizes of gradients at step 8", (self.folder / "run" / "report.html").read_text())

    def test_reductions_are_in_fp32_where_that_is_asked_for(self):
        flags = ["--precision", "bfloat16", "--weights", "low"]
        self.train("16 bits", *flags)
        self.train("reductions", *flags, "--fp32-reductions")
        losses = [[r["loss"] for r in self.records(run)] for run in ("16 bits", "reductions")]
        self.assertNotEqual(*losses)
        for one, other in zip(*losses):
            self.assertAlmostEqual(one, other, delta=0.02 * one)

    def test_in_16_bits_the_share_of_lost_updates_is_logged_and_drawn(self):
        self.train("run", "--precision", "bfloat16", "--weights", "low", "--gradient-statistics", "8")
        samples = self.events("run", "gradients")
        self.assertTrue(samples and all(0 <= s["lost_updates"] <= 1 for s in samples))
        self.assertGreater(max(s["lost_updates"] for s in samples), 0.1)
        self.assertIn("too small to move a 16-bit weight", (self.folder / "run" / "report.html").read_text())

    def test_the_gradient_noise_scale_is_logged_where_the_batch_is_split(self):
        self.train("whole")
        self.train("split", "--micro-batch", "2")
        self.assertFalse(any("gradient_noise_scale" in r for r in self.records("whole")))
        self.assertTrue(any("gradient_noise_scale" in r for r in self.records("split")))

    def test_what_does_not_go_together_is_refused(self):
        run = ["train", "--data", self.text, "--out", self.folder / "run"]
        self.refuses(2, *run, "--weights", "low", says=["weights low", "float32"])
        self.refuses(2, *run, "--weights", "half", says=["'half'", "full, low"])
        self.refuses(2, *run, "--precision-guard", "3", says=["precision_guard", "float32"])
        self.refuses(2, *run, "--lr-scaling", "cubic", says=["'cubic'", "none, linear, sqrt"])
        self.assertFalse((self.folder / "run").exists())


if __name__ == "__main__":
    main(__doc__)
