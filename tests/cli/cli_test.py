"""The program as its users meet it: runs `snug` on small texts and looks at what it prints, writes and returns.

usage: cli_test.py PATH-OF-SNUG [unittest arguments]
"""

import json
import os
import re

from program import GOLDEN, SMALL, SnugTest, TEXT, main


class Help(SnugTest):
    def test_is_as_recorded_and_fits_a_screen(self):
        for command in ("", "train", "sample", "report", "snapshots", "plan"):
            with self.subTest(command):
                shown = self.snug(*command.split(), "--help").stdout
                golden = GOLDEN / f"help_{command or 'snug'}.txt"
                if os.environ.get("SNUG_UPDATE_GOLDEN"):
                    golden.write_text(shown)
                self.assertEqual(shown, golden.read_text())
                self.assertLessEqual(len(shown.splitlines()), 40)


class Planning(SnugTest):
    def test_shows_a_curve_a_choice_and_what_would_do(self):
        shown = self.snug("plan", "--batch", "4", "--explain")
        self.assertEqual(shown.returncode, 0, shown.stderr)
        self.assertIn("100.0 %", shown.stdout)
        self.assertIn("aten::", shown.stdout)
        advice = r"One device: .+; several: .+\.$"
        self.assertRegex(shown.stdout.splitlines()[-1], "of it are .*" + advice)
        fits = self.snug("plan", "--batch", "4", "--memory", "1GiB")
        self.assertEqual(fits.returncode, 0, fits.stderr)
        self.assertRegex(fits.stdout.splitlines()[-1], f"^(It fits as it is.* What is short is time.*{advice}|Accumulate)")
        kept = [self.snug("plan", "--batch", "4", "--memory", "1GiB", "--plans", self.folder / "plans") for _ in range(2)]
        self.assertNotIn("Read from", kept[0].stdout)
        self.assertTrue(kept[1].stdout.startswith(f"Read from {self.folder}/plans/plan-"), kept[1].stderr)
        self.assertEqual(kept[1].stdout.split("\n", 1)[1], kept[0].stdout)
        self.refuses(2, "plan", "--plans", self.folder, says=["--memory"])
        refused = self.snug("plan", "--batch", "4", "--memory", "10KiB")
        self.assertEqual(refused.returncode, 3)
        self.assertIn("would do", refused.stderr)
        self.assertRegex(refused.stderr.strip(), "of it are .*" + advice)
        self.assertEqual(self.snug("plan", "--batch", "0").returncode, 2)
        little = ("plan", "--batch", "4", "--memory", "12MiB")
        self.refuses(3, *little, says=["--offload"])
        with_state_in_a_file = self.snug(*little, "--offload", self.folder)
        self.assertEqual(with_state_in_a_file.returncode, 0, with_state_in_a_file.stderr)
        self.assertTrue(with_state_in_a_file.stdout.endswith("The optimizer's state goes to a file.\n"))
        self.refuses(2, "plan", "--run", self.folder, "--offload", self.folder, says=["--run", "--offload"])
        self.refuses(2, "plan", "--offload", "", says=["--offload is empty"])


class Training(SnugTest):
    def test_writes_a_log_a_model_snapshots_and_a_report_and_samples(self):
        printed = self.train("run")
        self.assertIn("held-out loss", printed)
        run = self.folder / "run"
        self.assertEqual([r["step"] for r in self.records("run")], list(range(1, 9)))
        self.assertLess(self.losses("run")[-1], self.losses("run")[0])
        self.assertEqual(sorted(p.name for p in (run / "snapshots").iterdir()), ["step-00000004", "step-00000006", "step-00000008"])
        sampled = self.snug("sample", run, "--prompt", "Scene", "--count", "20")
        self.assertEqual(sampled.returncode, 0, sampled.stderr)
        self.assertTrue(sampled.stdout.startswith("Scene"))
        self.assertEqual(self.snug("report", run).returncode, 0)
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

    def test_a_memory_budget_is_kept_by_a_plan_with_the_same_bits(self):
        self.train("plain")
        peak = lambda out: max(r["peak_bytes"] for r in self.records(out))
        activations = max(r["activation_peak_bytes"] for r in self.records("plain"))
        budget = peak("plain") - int(0.65 * activations)
        printed = self.train("planned", "--memory", budget, "--micro-batch", "6")
        self.assertIn("planned for", printed)
        self.assertEqual(self.losses("plain"), self.losses("planned"))
        self.assertLessEqual(peak("planned"), budget)
        explained = self.snug("plan", "--run", self.folder / "planned")
        self.assertEqual(explained.returncode, 0, explained.stderr)
        self.assertIn("aten::", explained.stdout)
        page = (self.folder / "planned" / "report.html").read_text()
        self.assertIn("The plan", page)
        self.assertIn("aten::", page)
        self.train("chosen", "--memory", budget)
        self.assertLessEqual(peak("chosen"), budget)
        for whole, split in zip(self.losses("plain"), self.losses("chosen")):
            self.assertLess(abs(whole - split) / whole, 1e-5)
        self.refuses(2, "plan", "--run", self.folder / "plain", says=["--memory"])

    def test_a_plan_may_offload_and_has_the_same_bits_within_less_than_weights_and_gradients(self):
        self.train("plain")

        refused = self.snug("train", "--data", self.text, "--out", self.folder / "refused", *SMALL, "--micro-batch", "6",
                            "--memory", "13MiB")
        self.assertEqual(refused.returncode, 3, refused.stderr)
        in_memory = int(re.search(r"\((\d+) bytes\) would do", refused.stderr).group(1))
        weights, on_disk = 842496 * 4, 6 << 20
        self.assertLess(on_disk, 2 * weights)  # a plan that had only the moments in a file needs gradients, too
        self.assertLess(4 * weights, in_memory)
        printed = self.train("on disk", "--memory", on_disk, "--micro-batch", "6", "--offload")
        self.assertIn("computed again or offloaded", printed)  # which of both is faster here, measured times decide
        self.assertIn("weights, gradients and the optimizer's state in files", printed)
        self.assertEqual(self.losses("plain"), self.losses("on disk"))
        self.assertLessEqual(max(r["peak_bytes"] for r in self.records("on disk")), on_disk)

    def test_offload_gives_the_same_bits_and_less_memory_and_goes_with_checkpointing(self):
        self.train("plain")
        self.assertIn("offload: ", self.train("offload", "--offload"))
        self.train("both", "--offload", "--checkpoint", "blocks")
        self.assertEqual(self.losses("plain"), self.losses("offload"))
        self.assertEqual(self.losses("plain"), self.losses("both"))
        peak = lambda out: max(r["activation_peak_bytes"] for r in self.records(out))
        self.assertLess(peak("offload"), 0.7 * peak("plain"))
        self.assertEqual([p for p in (self.folder / "offload").iterdir() if "offload" in p.name], [])

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

    def test_zero_steps_mean_no_warm_up_and_only_the_end(self):
        self.train("run", "--warmup", "0", "--validate-every", "0", "--snapshot-every", "0", "--lr", "0.002")
        records = self.records("run")
        self.assertEqual(records[0]["learning_rate"], 0.002)
        self.assertEqual([r["step"] for r in records if r.get("validation_loss") is not None], [8])
        self.assertEqual([p.name for p in (self.folder / "run" / "snapshots").iterdir()], ["step-00000008"])

    def test_takes_several_files_and_folders(self):
        folder = self.folder / "texts"
        folder.mkdir()
        (folder / "a.txt").write_text(TEXT)
        self.train("two", "--data", folder)


class Report(SnugTest):
    def difference(self, one, other):
        """What the report says of two runs in this folder."""
        done = self.snug("report", "--run", self.folder / one, "--against", self.folder / other)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.splitlines()[-1].removeprefix("largest relative difference of a step's loss: ")

    def write_run_with_loss(self, loss):
        """A run of one step, as the run "trained" begins. Its folder is named as the loss."""
        settings = (self.folder / "trained" / "log.jsonl").read_text().splitlines()[0]
        record = self.records("trained")[0]
        folder = self.folder / str(loss)
        folder.mkdir()
        (folder / "log.jsonl").write_text(f"{settings}\n{json.dumps({**record, 'loss': loss})}\n")

    def test_compares_two_runs(self):
        self.train("a")
        self.train("b", "--checkpoint", "blocks")
        self.assertEqual(self.difference("a", "b"), "0")

    def test_of_a_loss_that_is_not_finite_or_zero_never_says_that_another_is_the_same(self):
        self.train("trained", "--steps", "2")
        for loss in (0.0, 2.0, 3.0, "nan", "inf"):
            self.write_run_with_loss(loss)
        for one, other, difference in ((2.0, 3.0, "0.5"), (2.0, "nan", "inf"), ("nan", 2.0, "inf"), ("nan", "nan", "0"),
                                       (0.0, 2.0, "inf"), (2.0, 0.0, "1"), (0.0, 0.0, "0"), (0.0, "nan", "inf"),
                                       ("inf", 2.0, "inf"), (2.0, "inf", "inf"), ("inf", "inf", "0"), ("inf", "nan", "inf")):
            with self.subTest(one=one, other=other):
                self.assertEqual(self.difference(str(one), str(other)), difference)

    def test_is_named_as_the_run_folder_however_that_is_written(self):
        run = self.folder / "my run"
        title = lambda: re.search("<title>(.*)</title>", (run / "report.html").read_text())[1]
        self.train("my run/", "--steps", "2")
        self.assertEqual(title(), "my run")
        for spelling in (f"{run}//", f"{run}/.", f"{run}/snapshots/.."):
            self.assertEqual(self.snug("report", "--run", spelling).returncode, 0)
            self.assertEqual(title(), "my run", spelling)


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
        self.refuses_to_train(2, *data, "--micro-batch", "auto", says=["--memory"])
        self.refuses_to_train(2, *data, "--micro-batch", "auto", "--memory", "1GiB", "--checkpoint", "none", says=["--checkpoint auto"])
        self.refuses_to_train(2, *data, "--micro-batch", "few", says=["few"])
        self.refuses_to_train(2, *data, "--batch", "6", "--accumulate", "4", says=["divide"])
        for batch in ("1000000000000", "9223372036854775807"):
            self.refuses_to_train(2, *data, "--batch", batch, says=[f"batch is {batch}", "this machine has"])
        self.refuses_to_train(2, *data, "--checkpoint", "auto", says=["checkpoint auto", "limit"])
        self.refuses_to_train(2, *data, "--checkpoint", "some", says=["some"])
        self.refuses_to_train(2, *data, "--model", "gpt-tinny", says=["gpt-tiny"])
        self.refuses_to_train(2, *data, "--precision", "float23", says=["float32"])
        self.refuses_to_train(2, *data, "--memory", "lots", says=["lots"])
        self.refuses_to_train(2, *data, "--lr", "nan", says=["lr"])
        self.refuses_to_train(2, *data, "--warmup", "11", "--steps", "10", says=["warmup_steps 11", "10 steps"])
        self.refuses_to_train(2, *data, "--warmup", "-1", says=["warmup_steps is -1"])
        self.refuses_to_train(2, *data, "--snapshot-every", "-1", says=["snapshot_every is -1"])
        for device in ("abacus", "cuda:99", "mps"):
            self.refuses_to_train(2, *data, "--device", device, says=[device, "cpu"])

    def test_what_does_not_fit_exits_with_3_and_the_limit(self):
        data = ["--data", self.text]
        self.refuses_to_train(3, *data, "--memory", "1MiB", says=["1.00 MiB"])                   # not even the parameters
        self.refuses_to_train(3, *data, "--memory", "10MiB", says=["10.00 MiB", "gradients"])  # not what comes with them
        self.refuses_to_train(3, *data, "--memory", "13MiB", says=["13.00 MiB", "would do"])    # not the first step
        self.refuses_to_train(3, *data, "--memory", "20MiB", "--checkpoint", "none", says=["20.00 MiB", "step 1"])

    def test_what_does_not_fit_is_answered_by_cures_that_can_help(self):
        self.refuses_to_train(3, "--data", self.text, "--memory", "1MiB", says=["the model does not fit", "smaller --model", "--offload"])
        done = self.snug("train", "--data", self.text, "--out", self.folder / "new", "--memory", "1MiB", "--offload", "--weights", "low",
                         "--precision", "bfloat16")
        for useless in ("micro-batch", "checkpoint", "--offload"):
            self.assertNotIn(useless, done.stderr)

    def test_a_run_folder_that_is_a_file_is_named(self):
        self.refuses(2, "train", "--data", self.text, "--out", self.text, says=["text.txt", "is no folder"])
        self.assertEqual(self.text.read_text(), TEXT)

    def test_too_little_text_asks_for_more(self):
        little = self.folder / "little.txt"
        little.write_text("a" * 300)
        self.refuses_to_train(2, "--data", little, says=["little.txt", "30 tokens", "give more text\n"])

    def test_a_run_folder_that_exists_is_not_touched(self):
        self.train("run")
        before = (self.folder / "run" / "log.jsonl").read_bytes()
        self.refuses(2, "train", "--data", self.text, "--out", self.folder / "run", says=["--resume", "--out"])
        self.assertEqual(before, (self.folder / "run" / "log.jsonl").read_bytes())
        self.refuses(2, "train", "--resume", "--out", self.folder / "absent", says=["absent"])

    def test_unknown_words_name_the_nearest_known_one(self):
        self.refuses(2, "train", "--dta", "x", says=["--dta", "--data"])
        self.refuses(2, "trian", says=["trian", "train"])
        self.refuses(2, "train", "--data", "x", "--memory", "30", "MB", "--seed", "1", says=["'MB' is a word too many", "'30 MB'"])
        self.refuses(2, "sample", "--temprature", "1", says=["--temperature"])
        self.refuses(2, "report", "--run", self.folder / "absent", says=["absent"])
        self.refuses(2, "sample", "--run", self.folder / "absent", says=["absent"])


if __name__ == "__main__":
    main(__doc__)
