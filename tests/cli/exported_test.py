"""Models of torch.export under snug train and snug plan. Skipped where the given Python has no torch.

usage: exported_test.py PATH-OF-SNUG PYTHON [unittest arguments]
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

PYTHON = sys.argv.pop(2) if len(sys.argv) > 2 else sys.executable

from program import SMALL, SnugTest, TIMES, main  # noqa: E402

MODELS = pathlib.Path(__file__).resolve().parent / "exported_models.py"
FILES = tempfile.TemporaryDirectory()
MADE = pathlib.Path(FILES.name)


def peak(record):
    return record["peak_bytes"]


class ExportedTest(SnugTest):
    def run_of(self, out, model, data, *arguments):
        done = self.snug("train", "--model", MADE / model, "--data", data, "--out", self.folder / out, *SMALL, *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def without_times(self, out):
        return [{key: value for key, value in line.items() if key not in TIMES} for line in self.logged(out)]

    def weights(self, out):
        return (self.folder / out / "model.safetensors").read_bytes()

    def same_runs(self, one, other):
        self.assertEqual(self.without_times(one), self.without_times(other))
        self.assertEqual(self.weights(one), self.weights(other))

    def refuses_to_train(self, model, data, *arguments, says, status=2):
        self.refuses(status, "train", "--model", MADE / model, "--data", data, "--out", self.folder / "refused", *arguments, says=says)
        self.assertFalse((self.folder / "refused").exists())


class Training(ExportedTest):
    def test_on_text_and_on_rows_lowers_the_loss_and_writes_a_run_folder(self):
        for model, data in (("words.pt2", self.text), ("one.pt2", self.text), ("rows.pt2", MADE / "rows")):
            with self.subTest(model=model):
                printed = self.run_of(model, model, data, "--steps", "60", "--batch", "32", "--lr", "0.01")
                losses = self.losses(model)
                self.assertLess(sum(losses[-5:]), 0.95 * sum(losses[:5]))
                self.assertIn("held-out loss", printed)
                self.assertNotIn("nats per byte", printed)
                self.assertIn(" items/s ", printed)
                self.assertIn("Items per second", (self.folder / model / "report.html").read_text())
                self.assertTrue((self.folder / model / "report.html").exists())

    def test_in_micro_batches_has_the_losses_of_the_whole_batch_but_for_rounding(self):
        self.run_of("whole", "without_dropout.pt2", MADE / "rows", "--batch", "15")
        self.run_of("split", "without_dropout.pt2", MADE / "rows", "--batch", "15", "--micro-batch", "4")
        self.assertEqual(self.records("split")[0]["micro_batches"], 4)
        for one, other in zip(self.losses("whole"), self.losses("split"), strict=True):
            self.assertAlmostEqual(one, other, delta=1e-5 * one)

    def test_on_tokens_of_16_bits_is_that_on_the_same_text(self):
        text = self.text if self.text.is_file() else next(path for path in sorted(self.text.rglob("*")) if path.is_file())
        tokens = self.folder / "tokens"
        tokens.mkdir()
        (tokens / "train.bin").write_bytes(b"".join(bytes((byte, 0)) for byte in text.read_bytes()))
        self.run_of("as_text", "words.pt2", text)
        self.run_of("as_tokens", "words.pt2", tokens)
        self.assertEqual(self.losses("as_text"), self.losses("as_tokens"))
        self.assertEqual(self.weights("as_text"), self.weights("as_tokens"))

    def test_refuses_tokens_beside_text_and_half_a_token(self):
        mixed = self.folder / "mixed"
        mixed.mkdir()
        (mixed / "notes.txt").write_text("to be or not to be " * 500)
        (mixed / "stray.bin").write_bytes(bytes(8000))
        self.refuses_to_train("words.pt2", mixed, says=["stray.bin", "as tokens", "notes.txt", "--data"])
        (mixed / "notes.txt").unlink()
        (mixed / "stray.bin").write_bytes(bytes(8001))
        self.refuses_to_train("words.pt2", mixed, says=["stray.bin", "8001"])

    def test_under_half_the_memory_has_the_same_losses(self):
        flags = ("--batch", "64", "--micro-batch", "64")
        self.run_of("plain", "words.pt2", self.text, *flags)
        budget = max(map(peak, self.records("plain"))) // 2
        printed = self.run_of("planned", "words.pt2", self.text, *flags, "--memory", budget)
        self.assertIn("planned for", printed)
        self.assertEqual(self.losses("plain"), self.losses("planned"))
        self.assertEqual(self.weights("plain"), self.weights("planned"))
        self.assertLessEqual(max(map(peak, self.records("planned"))), budget)

    def test_in_sixteen_bits_ends(self):
        self.run_of("low", "rows.pt2", MADE / "rows", "--precision", "bfloat16", "--weights", "low")
        self.assertEqual(len(self.losses("low")), 8)

    def test_gives_weights_with_which_python_finds_the_same_held_out_loss(self):
        self.run_of("run", "rows.pt2", MADE / "rows")
        found = subprocess.run([PYTHON, MODELS, MADE, self.folder / "run" / "model.safetensors"], capture_output=True, text=True)
        self.assertEqual(found.returncode, 0, found.stderr)
        self.assertEqual(float(found.stdout), self.records("run")[-1]["validation_loss"])

    def test_fixed_for_a_number_of_samples_takes_it_alone_or_in_multiples(self):
        self.run_of("fixed", "fixed.pt2", self.text, "--batch", "4")
        self.run_of("twice", "fixed.pt2", self.text, "--batch", "8", "--micro-batch", "4")
        self.run_of("planned", "fixed.pt2", self.text, "--batch", "4", "--memory", "1GiB")
        self.assertEqual(self.losses("fixed"), self.losses("planned"))
        for flags in (("--batch", "6"), ("--batch", "8"), ("--batch", "6", "--micro-batch", "4"), ("--batch", "8", "--micro-batch", "2")):
            self.refuses_to_train("fixed.pt2", self.text, *flags, says=["for 4 samples", "--batch 4"])


class Resuming(ExportedTest):
    def resumed(self, out, *arguments):
        return self.snug("train", "--resume", "--out", self.folder / out, *arguments)

    def cut_back(self, out, step):
        """As if the run had been killed after `step`: of its snapshots and files only those of then are there."""
        for snapshot in (self.folder / out / "snapshots").iterdir():
            if int("".join(filter(str.isdigit, snapshot.name)) or 0) > step:
                shutil.rmtree(snapshot) if snapshot.is_dir() else snapshot.unlink()

    def test_goes_on_to_the_same_bits(self):
        for model, data in (("words.pt2", self.text), ("rows.pt2", MADE / "rows")):
            with self.subTest(model=model):
                whole, cut = f"whole-{model}", f"cut-{model}"
                self.run_of(whole, model, data, "--batch", "32")
                self.run_of(cut, model, data, "--batch", "32")
                self.cut_back(cut, 4)
                done = self.resumed(cut)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn("resumed after step 4", done.stdout)
                self.same_runs(whole, cut)

    def test_refuses_another_file_and_other_data(self):
        model, data = self.folder / "model.pt2", self.folder / "data.safetensors"
        shutil.copy(MADE / "rows.pt2", model)
        shutil.copy(MADE / "rows" / "a.safetensors", data)
        self.run_of("run", model, data)
        with data.open("r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b"\x01")
        self.refuses(2, "train", "--resume", "--out", self.folder / "run", says=["data.safetensors are not those", "--data"])
        shutil.copy(MADE / "rows" / "a.safetensors", data)
        with model.open("ab") as file:
            file.write(b"\0")
        self.refuses(1, "train", "--resume", "--out", self.folder / "run", says=["model.pt2", "damaged"])
        shutil.copy(MADE / "without_dropout.pt2", model)
        self.refuses(2, "train", "--resume", "--out", self.folder / "run", says=["model.pt2 are not those", "--model"])
        os.remove(model)
        self.refuses(2, "train", "--resume", "--out", self.folder / "run", says=["model.pt2, the model of the run", "--model"])
        self.refuses(2, "train", "--resume", "--out", self.folder / "run", "--model", "gpt-tiny", says=["model = ", "gpt-tiny"])
        shutil.copy(MADE / "rows.pt2", model)
        self.assertEqual(self.resumed("run").returncode, 0)

    def test_goes_on_with_a_model_and_data_that_have_moved(self):
        model, data = self.folder / "model.pt2", self.folder / "data.safetensors"
        shutil.copy(MADE / "rows.pt2", model)
        shutil.copy(MADE / "rows" / "a.safetensors", data)
        self.run_of("whole", model, data)
        self.run_of("run", model, data)
        self.cut_back("run", 4)
        model.rename(self.folder / "moved.pt2")
        data.rename(self.folder / "moved.safetensors")
        done = self.resumed("run", "--model", self.folder / "moved.pt2", "--data", self.folder / "moved.safetensors")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.losses("whole"), self.losses("run"))
        with_settings = (self.folder / "run" / "log.jsonl").read_text().splitlines()[0]
        self.assertIn("moved.pt2", with_settings)
        self.assertIn("moved.safetensors", with_settings)


class Refusals(ExportedTest):
    def test_name_the_file_and_the_cure(self):
        rows = MADE / "rows"
        self.refuses_to_train("absent.pt2", self.text, says=["absent.pt2"])
        self.refuses_to_train("scores.pt2", MADE / "few.safetensors", says=["9 samples", "tenth"])
        self.refuses_to_train("scores.pt2", rows, says=["scores.pt2", "no loss", "scalar"])
        self.refuses_to_train("rows.pt2", self.text, says=[".safetensors", "tokens"])
        self.refuses_to_train("rows.pt2", MADE / "other_name.safetensors", says=["other_name", "'target'"])
        self.refuses_to_train("rows.pt2", MADE / "other_type.safetensors", says=["'target'", "Int", "Long"])
        self.refuses_to_train("rows.pt2", MADE / "other_size.safetensors", says=["'input'", "5 in dimension 1", "takes 6"])
        self.refuses_to_train("rows.pt2", MADE / "other_rows.safetensors", says=["'target'", "9 samples", "7"])
        self.refuses_to_train("without_eval.pt2", self.text, "--batch", "4", says=["eval"])
        self.refuses_to_train("rows.pt2", rows, "--checkpoint", "blocks", says=["blocks", "--memory"])
        self.refuses_to_train("words.pt2", self.text, "--memory", "100KiB", says=["100"], status=3)

    def test_a_run_of_such_a_model_writes_no_text(self):
        self.run_of("run", "rows.pt2", MADE / "rows")
        self.refuses(2, "sample", "--run", self.folder / "run", says=["rows.pt2", "GPT"])


class Planning(ExportedTest):
    def test_prints_the_curve_and_what_lies_at_the_peak(self):
        done = self.snug("plan", "--model", MADE / "words.pt2", "--batch", "32", "--explain")
        self.assertEqual(done.returncode, 0, done.stderr)
        for text in ("words.pt2, 32 samples at once", "In all at least", "The most frugal plan", "The plain step takes"):
            self.assertIn(text, done.stdout)

    def test_within_a_budget_prints_the_choice_or_ends_with_3(self):
        plan = lambda memory: self.snug("plan", "--model", MADE / "words.pt2", "--batch", "32", "--memory", memory)
        self.assertEqual(plan("1GiB").returncode, 0)
        refused = plan("10KiB")
        self.assertEqual(refused.returncode, 3)
        self.assertIn("would do", refused.stderr)
        least = refused.stderr.split("(")[1].split(" bytes")[0]
        self.assertEqual(plan(least).returncode, 0)

    def test_refuses_what_cannot_be_planned(self):
        self.refuses(2, "plan", "--model", MADE / "fixed.pt2", says=["4 samples", "--batch 4"])
        self.refuses(2, "plan", "--model", MADE / "scores.pt2", says=["no loss"])
        self.refuses(2, "plan", "--model", MADE / "absent.pt2", says=["absent.pt2"])


if __name__ == "__main__":
    made = subprocess.run([PYTHON, MODELS, MADE], env={**os.environ, "OMP_NUM_THREADS": "2"})
    if made.returncode != 0:
        sys.exit(made.returncode)
    main(__doc__)
