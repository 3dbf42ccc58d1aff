"""Runs that are killed, interrupted or changed, and what becomes of them when they are resumed.

usage: resume_test.py PATH-OF-SNUG [unittest arguments]
"""

import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import time

from program import ENVIRONMENT, SMALL, SNUG, SnugTest, TEXT, TIMES, main


class ResumeTest(SnugTest):
    def same_but_times(self, one, other):
        strip = lambda out: [{k: v for k, v in r.items() if k not in TIMES} for r in self.logged(out)]
        self.assertEqual(strip(one), strip(other))

    def model(self, out):
        return (self.folder / out / "model.safetensors").read_bytes()

    def resume(self, out, *arguments):
        done = self.snug("train", "--resume", "--out", self.folder / out, *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def started(self, out, *arguments, **more):
        return subprocess.Popen([SNUG, "train", "--data", self.text, "--out", self.folder / out, *SMALL, *arguments],
                                stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, **more)

    def killed(self, out, is_time, *arguments):
        """Starts a run and kills it as soon as is_time(its folder)."""
        with self.started(out, *arguments) as process:
            while process.poll() is None and not is_time(self.folder / out):
                time.sleep(0.002)
            process.kill()

    def goes_on_to_the_same_bits(self, whole, out):
        self.resume(out)
        self.same_but_times(whole, out)
        self.assertEqual(self.model(whole), self.model(out))


def log_has(lines):
    return lambda run: (run / "log.jsonl").exists() and (run / "log.jsonl").read_bytes().count(b"\n") >= lines


class KillMinus9(ResumeTest):
    def test_at_any_moment_goes_on_to_the_same_bits(self):
        flags = ["--checkpoint", "blocks", "--micro-batch", "4"]
        self.train("whole", *flags)
        for lines in (1, 2, 3, 4, 6, 7):
            with self.subTest(lines=lines):
                self.killed(f"killed{lines}", log_has(lines), *flags)
                self.goes_on_to_the_same_bits("whole", f"killed{lines}")

    def test_while_snapshots_are_written_behind_goes_on_to_the_same_bits(self):
        self.train("whole")
        self.killed("killed", log_has(5), "--async-snapshots")
        self.assertRegex(self.resume("killed"), r"snapshots took \d+\.\d\d s of training, and")
        self.assertEqual(self.model("whole"), self.model("killed"))
        self.assertEqual(self.losses("whole"), self.losses("killed"))
        self.assertEqual(self.events("killed", "snapshots")[-1]["at_once"], 0)

    def test_in_float16_goes_on_to_the_same_bits_and_loss_scales(self):
        flags = ["--precision", "float16", "--batch", "2", "--steps", "5"]
        self.train("whole", *flags)
        for lines in (2, 4, 5):
            with self.subTest(lines=lines):
                self.killed(f"killed{lines}", log_has(lines), *flags)
                self.goes_on_to_the_same_bits("whole", f"killed{lines}")

    def test_before_the_log_exists_leaves_what_the_same_command_begins_in(self):
        self.train("whole")
        self.killed("early", lambda run: True)  # long before the first step
        (self.folder / "empty").mkdir()
        (self.folder / "torn").mkdir()
        (self.folder / "torn" / "log.jsonl.tmp-0123456789abcdef").write_text('{"snug_r')
        (self.folder / "torn" / "snug-unnamed-a1B2c3").touch()
        for out in ("early", "empty", "torn"):
            with self.subTest(out):
                self.refuses(2, "train", "--resume", "--out", self.folder / out, says=["no run", out])
                self.train(out)
                self.same_but_times("whole", out)
        self.assertEqual(sorted(p.name for p in (self.folder / "torn").iterdir()),
                         ["lock", "log.jsonl", "model.safetensors", "report.html", "snapshots"])

    def test_after_the_last_snapshot_leaves_what_resuming_finishes(self):
        printed = self.train("whole").splitlines()[-1]
        self.killed("late", lambda run: (run / "snapshots" / "step-00000008").exists())
        for name in ("model.safetensors", "report.html"):  # it may have been too late
            (self.folder / "late" / name).unlink(missing_ok=True)
        self.assertEqual(self.resume("late").splitlines()[-1], printed.replace("whole", "late"))
        self.same_but_times("whole", "late")
        self.assertEqual(self.model("whole"), self.model("late"))
        self.assertTrue((self.folder / "late" / "report.html").exists())


    def test_after_the_last_snapshot_of_a_planned_run_leaves_what_resuming_finishes(self):
        printed = self.train("run", "--memory", "30MiB", "--batch", "64", "--steps", "1").splitlines()[-1]
        (self.folder / "run" / "model.safetensors").unlink()  # as a kill leaves it
        self.assertEqual(self.resume("run").splitlines()[-1], printed)
        self.assertTrue((self.folder / "run" / "model.safetensors").exists())

    def test_with_the_plan_that_the_run_had(self):
        flags = ["--memory", "30MiB", "--batch", "64", "--steps", "8", "--snapshot-every", "1"]
        self.killed("stopped", log_has(2), *flags)
        self.assertRegex(self.resume("stopped"), r"planned for 30.00 MiB \(read from .*/stopped/plans/plan-[0-9a-f]{16}\.json\)")


class Spike(ResumeTest):
    FLAGS = ["--batch", "1", "--steps", "60", "--snapshot-every", "10", "--validate-every", "0", "--lr", "0.003", "--warmup", "0"]

    def setUp(self):
        super().setUp()
        noise = random.Random(1).randbytes(1000).decode("latin-1")
        self.text.write_text("a" * 60000 + noise + "a" * 30000)  # one sample in some hundred is unlike all others

    def test_is_noted_and_its_update_left_out_where_that_is_asked_for(self):
        printed = self.train("run", *self.FLAGS, "--on-spike", "skip")
        spikes = self.events("run", "spike")
        self.assertTrue(spikes)
        for spike in spikes:
            record = next(r for r in self.records("run") if r["step"] == spike["step"])
            self.assertFalse(record["stepped"])
            self.assertIn(f"step {spike['step']} skipped: the ", printed)
        self.assertIn("spike", (self.folder / "run" / "report.html").read_text())
        self.train("plain", *self.FLAGS)
        first = spikes[0]["step"]
        self.assertEqual(self.losses("run")[:first], self.losses("plain")[:first])
        self.assertNotEqual(self.losses("run")[first:], self.losses("plain")[first:])

    def test_brings_the_run_back_to_its_newest_snapshot_also_after_a_kill(self):
        flags = [*self.FLAGS, "--on-spike", "roll-back"]
        self.assertIn("went back from step", self.train("whole", *flags))
        backs = self.events("whole", "roll back")
        self.assertTrue(all(back["step"] % 10 == 0 and back["from_step"] > back["step"] for back in backs))
        self.assertEqual([record["step"] for record in self.records("whole")], list(range(1, 61)))
        self.killed("killed", log_has(backs[0]["step"] + 5), *flags)
        self.resume("killed")
        self.assertEqual(self.model("whole"), self.model("killed"))

    def test_without_end_ends_the_run(self):
        self.refuses(1, "train", "--data", self.text, "--out", self.folder / "run", "--batch", "1", "--steps", "40", "--lr", "1e38",
                     "--warmup", "0", "--on-spike", "skip", says=["--lr"])


class Interrupting(ResumeTest):
    def interrupted(self, out, signal_number):
        """What a run prints that is told to stop once its log is there."""
        with self.started(out, "--steps", "80") as process:
            while not log_has(1)(self.folder / out):
                time.sleep(0.01)
            process.send_signal(signal_number)
            printed, _ = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 128 + signal_number)
        return printed

    def test_finishes_the_step_saves_and_says_how_to_go_on(self):
        self.train("whole", "--steps", "80")
        out = "a user's run"  # a shell wants quotes
        printed = self.interrupted(out, signal.SIGINT)
        self.assertLess(len(self.records(out)), 80)
        command = shlex.split(printed.splitlines()[-1].split("Go on with: ")[1])
        self.assertEqual(command, ["snug", "train", "--resume", "--out", str(self.folder / out)])
        self.goes_on_to_the_same_bits("whole", out)

    def test_removes_the_rest_of_a_report_that_was_killed(self):
        self.train("run")
        rest = self.folder / "run" / "report.html.tmp-0123456789abcdef"
        rest.write_text("<html")
        unnamed = self.folder / "run" / "snug-unnamed-a1B2c3"  # where the file system has no O_TMPFILE
        unnamed.touch()
        self.resume("run")
        self.assertFalse(rest.exists() or unnamed.exists())

    def test_by_several_signals_at_once_is_interrupting_once(self):
        with self.started("run", "--steps", "80") as process:
            while not log_has(1)(self.folder / "run"):
                time.sleep(0.01)
            # When it goes on, it gets both: its threads may take them in either order.
            for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGHUP, signal.SIGCONT):
                process.send_signal(number)
            printed, _ = process.communicate(timeout=120)
        self.assertIn(process.returncode, (128 + signal.SIGHUP, 128 + signal.SIGTERM))
        self.assertIn("and saved", printed)

    def test_by_a_second_signal_ends_it_at_once_but_for_a_hangup(self):
        for second in (signal.SIGTERM, signal.SIGHUP):
            with self.subTest(second), self.started(f"run{second}", "--batch", "256", "--steps", "80") as process:
                while not log_has(1)(self.folder / f"run{second}"):
                    time.sleep(0.01)
                process.send_signal(signal.SIGINT)
                time.sleep(0.2)
                process.send_signal(second)
                printed, _ = process.communicate(timeout=120)
                saved = 128 + signal.SIGINT  # also where its step has ended before the second came
                self.assertIn(process.returncode, (saved, -signal.SIGTERM) if second == signal.SIGTERM else (saved,))

    def test_by_a_signal_that_is_ignored_does_nothing(self):
        def ignore():
            for number in (signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)

        with self.started("run", preexec_fn=ignore) as process:
            while not log_has(1)(self.folder / "run"):
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGHUP)
            printed, _ = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 0)
        self.assertIn("done: ", printed)

    def test_by_a_reader_that_goes_away_does_nothing_and_is_said(self):
        with self.started("run", stderr=subprocess.PIPE) as process:
            self.assertIn("step 1/8", process.stdout.readline())
            process.stdout.close()
            self.assertRegex(process.stderr.read(), r"\Asnug: standard output cannot be written: [^\n]+\n\Z")
            self.assertEqual(process.wait(timeout=120), 0)
        self.assertTrue((self.folder / "run" / "model.safetensors").exists())

    def test_by_a_limit_of_files_is_an_error_and_leaves_nothing_in_halves(self):
        self.train("whole")
        self.killed("run", log_has(7))
        before = sorted(path.name for path in (self.folder / "run" / "snapshots").iterdir() if "." not in path.name)
        limit = 4 << 20  # bytes: weights do, the optimizer's state does not
        limited = subprocess.run([SNUG, "train", "--resume", "--out", self.folder / "run"], capture_output=True, text=True,
                                 env=ENVIRONMENT, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
        self.assertEqual(limited.returncode, 1, limited.stderr)
        self.assertRegex(limited.stderr, r"\Asnug: [^\n]*snapshots[^\n]*: File too large \(see ulimit -f\)\n\Z")
        self.assertEqual(sorted(path.name for path in (self.folder / "run" / "snapshots").iterdir()), before)
        self.goes_on_to_the_same_bits("whole", "run")

    def test_by_sigterm_does_the_same(self):
        self.assertIn("Go on with", self.interrupted("stopped", signal.SIGTERM))
        steps = len(self.records("stopped"))
        self.assertTrue((self.folder / "stopped" / "snapshots" / f"step-{steps:08}").exists())


class Owning(ResumeTest):
    def test_a_second_process_is_refused_until_the_first_is_dead(self):
        self.train("whole", "--steps", "80")
        with self.started("run", "--steps", "80") as process:
            while not log_has(1)(self.folder / "run"):
                time.sleep(0.01)
            says = [f"process {process.pid} on ", "trains in", "--out"]
            self.refuses(2, "train", "--resume", "--out", self.folder / "run", says=says)
            process.send_signal(signal.SIGSTOP)  # alive, and silent
            self.refuses(2, "train", "--resume", "--out", self.folder / "run", says=says)
            process.kill()
        self.goes_on_to_the_same_bits("whole", "run")


class EachOptimizer(ResumeTest):
    def test_trains_and_goes_on_to_the_same_bits_after_a_kill_and_another_is_refused(self):
        losses = set()
        for name in ("adamw", "adamw8bit", "adam", "sgd", "muon", "adamw8bit-of-low-weights"):
            flags = ["--optimizer", name.removesuffix("-of-low-weights")]
            if name == "adamw8bit-of-low-weights":
                flags += ["--weights", "low", "--precision", "bfloat16"]
            with self.subTest(name):
                self.train(f"whole-{name}", *flags)
                self.killed(f"killed-{name}", log_has(5), *flags)
                self.goes_on_to_the_same_bits(f"whole-{name}", f"killed-{name}")
                losses.add(self.losses(f"whole-{name}")[-1])
        self.assertEqual(len(losses), 6, "each is another optimizer")
        self.refuses(2, "train", "--resume", "--out", self.folder / "whole-sgd", "--optimizer", "adamw",
                     says=["optimizer = sgd", "adamw"])
        self.refuses(2, "train", "--data", self.text, "--out", self.folder / "new", "--optimizer", "lion", says=["lion", "muon"])


class Resuming(ResumeTest):
    def test_refuses_other_settings(self):
        self.train("run")
        self.refuses(2, "train", "--resume", "--out", self.folder / "run", "--batch", "7", says=["batch = 6", "7"])
        self.refuses(2, "train", "--resume", "--out", self.folder / "run", "--warmup", "0", says=["warmup_steps = 1", "0"])

    def test_knows_the_text_by_its_bytes_and_not_by_the_spelling_of_its_path(self):
        self.train("run", "--steps", "2")
        link = self.folder / "link"
        link.symlink_to(self.folder)
        for spelling in (f"{self.folder}/run/../text.txt", f"{self.folder}//./text.txt", link / "text.txt"):
            self.resume("run", "--data", spelling)
        self.text.write_text(TEXT.replace("gentleman", "gentlefol", 1))
        self.refuses(2, "train", "--resume", "--out", self.folder / "run", says=["text.txt are not those", "--data"])
        self.text.write_text(TEXT)
        self.resume("run")

    def test_on_data_that_have_moved_goes_on_to_the_same_bits(self):
        self.train("whole")
        self.killed("run", log_has(7))  # there is a snapshot
        run, moved, other = self.folder / "run", self.folder / "elsewhere" / "moved.txt", self.folder / "other.txt"
        moved.parent.mkdir()
        self.text.rename(moved)
        other.write_text(TEXT.replace("gentleman", "gentlefol", 1))
        log = (run / "log.jsonl").read_bytes()
        resume = ("train", "--resume", "--out", run)
        self.refuses(2, *resume, says=[f"{self.text}, the data of the run", "--data"])
        self.refuses(2, *resume, "--data", self.folder / "absent.txt", says=["absent.txt, the data of the run", "--data"])
        self.refuses(2, *resume, "--data", other, says=["other.txt are not those", "--data"])
        self.assertEqual((run / "log.jsonl").read_bytes(), log)
        self.killed_again(run, moved)
        settings = json.loads((run / "log.jsonl").read_text().splitlines()[0])["settings"]
        self.assertEqual(settings["data"], str(moved.resolve()))  # so it need not be given again
        self.resume("run")
        self.assertEqual(self.model("whole"), self.model("run"))
        self.assertEqual(self.losses("whole"), self.losses("run"))

    def killed_again(self, run, data):
        """Resumes a run on these data, and kills it as soon as its log names them."""
        with subprocess.Popen([SNUG, "train", "--resume", "--out", run, "--data", data], stdout=subprocess.DEVNULL,
                              env=ENVIRONMENT) as process:
            while process.poll() is None and str(data.resolve()) not in (run / "log.jsonl").read_text():
                time.sleep(0.002)
            process.kill()

    def test_within_the_limit_or_another_one(self):
        flags = ["--batch", "1", "--steps", "4", "--snapshot-every", "1", "--memory", "15MiB"]
        self.train("whole", *flags)
        for limit in ([], ["--memory", "30MiB"]):
            out = f"stopped{len(limit)}"
            self.killed(out, log_has(4), *flags)
            self.resume(out, *limit)
            self.assertEqual(self.model("whole"), self.model(out))
        settings = json.loads((self.folder / out / "log.jsonl").read_text().splitlines()[0])["settings"]
        self.assertEqual(settings["memory"], str(30 << 20))  # so it holds in the next one, too
        self.resume(out)
        self.refuses(3, "train", "--resume", "--out", self.folder / out, "--memory", "4MiB", says=["4.00 MiB"])

    def test_says_before_the_first_step_what_differs_from_before_and_may_change_last_bits(self):
        run = self.folder / "run"

        def said(*arguments, threads):
            """The lines of that kind, all printed before the first step."""
            done = self.snug("train", "--out", run, *arguments, OMP_NUM_THREADS=str(threads))
            self.assertEqual(done.returncode, 0, done.stderr)
            begin, _, rest = done.stdout.partition("\nstep ")
            self.assertNotIn("last bits", rest)
            return [line for line in begin.splitlines() if "last bits" in line]

        def resumed(after, threads):
            for path in run.glob("snapshots/*"):
                if int(path.name[-8:]) > after:
                    shutil.rmtree(path)
            return said("--resume", threads=threads)

        def machines(change):
            """Changes the lines of the log that say what the run was on."""
            log = run / "log.jsonl"
            lines = [change(line) if '"event":"machine"' in line else line for line in log.read_text().splitlines(True)]
            log.write_text("".join(lines))

        self.assertEqual(said("--data", self.text, *SMALL, "--snapshot-every", "1", threads=1), [])
        self.assertEqual(resumed(7, threads=1), [])
        self.assertRegex(resumed(6, threads=2)[0], "goes on with threads 2, not 1: from here on, losses and weights may")
        self.assertEqual(resumed(6, threads=1), [], "up to step 6 it was one thread")
        self.assertEqual(len(resumed(6, threads=2)), 1)
        self.assertEqual(resumed(7, threads=2), [], "step 7 was made by two")
        self.assertEqual(len(resumed(7, threads=1)), 1)
        self.assertEqual(resumed(8, threads=2), [], "no step is left")
        machines(lambda line: re.sub('"libtorch":"[^"]*"', '"libtorch":"1.13.1"', line))
        self.assertRegex(resumed(7, threads=2)[0], r"goes on with libtorch [2-9]\S*, not 1.13.1: from here on")
        machines(lambda line: "")
        self.assertEqual(resumed(6, threads=1), [], "there is nothing to compare with")
        self.assertEqual(len(resumed(7, threads=2)), 1)

    def test_says_where_the_plan_has_another_micro_batch(self):
        flags = ["--batch", "64", "--memory", "30MiB", "--steps", "2", "--snapshot-every", "1"]
        self.train("run", *flags)
        run = self.folder / "run"
        shutil.rmtree(run / "snapshots" / "step-00000002")
        self.assertNotIn("last bits", self.resume("run"))
        shutil.rmtree(run / "snapshots" / "step-00000002")
        log = run / "log.jsonl"
        log.write_text(re.sub('"micro_batch":[0-9]+,"micro_batches"', '"micro_batch":63,"micro_batches"', log.read_text()))
        self.assertRegex(self.resume("run"), "step 2: micro-batches of [0-9]+, not of 63 as before: from here on, losses")

    def test_of_a_finished_run_keeps_its_settings(self):
        self.train("run", "--memory", "30MiB")
        settings = (self.folder / "run" / "log.jsonl").read_text().splitlines()[0]
        self.resume("run", "--memory", "40MiB")
        self.assertEqual((self.folder / "run" / "log.jsonl").read_text().splitlines()[0], settings)

    def test_on_text_whose_path_is_not_utf8(self):
        path = os.fsencode(self.folder) + b"/r\xe9sum\xe9 100%\n.txt"
        os.rename(self.text, path)
        for arguments in ([b"--data", path, *map(str.encode, SMALL)], [b"--resume"], [b"--resume", b"--data", path]):
            done = subprocess.run([os.fsencode(SNUG), b"train", b"--out", os.fsencode(self.folder / "run"), *arguments],
                                  capture_output=True, env=ENVIRONMENT)
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_on_a_folder_that_holds_the_run_itself(self):
        for arguments in (["--data", ".", "--tensorboard", "run/board", *SMALL], ["--resume"], ["--resume", "--data", "."]):
            done = subprocess.run([SNUG, "train", "--out", "run", *arguments], capture_output=True, text=True,
                                  cwd=self.folder, env=ENVIRONMENT)
            self.assertEqual(done.returncode, 0, done.stderr)
        self.refuses(2, "train", "--data", self.folder, "--out", self.folder / "new", "--tensorboard", self.folder / "board",
                     says=["--tensorboard", "outside"])
        self.assertFalse((self.folder / "board").exists())

    def test_after_a_first_step_that_failed_begins_anew_where_the_board_is_in_the_run_folder(self):
        flags = ["--tensorboard", self.folder / "run" / "board"]
        data = ["train", "--data", self.text, "--out", self.folder / "run", *SMALL]
        self.refuses(3, *data, *flags, "--memory", "13MiB", says=["13.00 MiB"])
        self.assertFalse((self.folder / "run").exists())
        self.train("run", *flags)
        self.assertEqual(len(list((self.folder / "run" / "board").iterdir())), 1)

    def test_what_became_nan_ends_with_a_snapshot_from_before(self):
        self.refuses(1, "train", "--data", self.text, "--out", self.folder / "run", "--batch", "1", "--steps", "6", "--lr", "1e38",
                     "--warmup", "6", "--snapshot-every", "1", says=["is not finite", "a norm of nan", "--lr"])
        last = self.records("run")[-1]["step"]
        self.assertEqual(max(p.name for p in (self.folder / "run" / "snapshots").iterdir()), f"step-{last - 1:08}")

    def test_weights_that_became_infinite_by_finite_gradients_are_in_no_snapshot(self):
        self.refuses(1, "train", "--data", self.text, "--out", self.folder / "run", "--batch", "1", "--steps", "1", "--lr", "1e39",
                     "--warmup", "0", says=["is not finite", "--lr"])
        self.assertFalse(list((self.folder / "run").glob("snapshots/*")))
        self.assertFalse((self.folder / "run" / "model.safetensors").exists())

    def test_a_damaged_snapshot_is_passed_over_and_said_and_the_run_ends_with_the_same_bits(self):
        self.train("whole")
        self.train("run")
        snapshots = self.folder / "run" / "snapshots"
        part = snapshots / "step-00000008" / "model.safetensors"
        part.write_bytes(part.read_bytes()[:1000])
        self.refuses(1, "snapshots", "--run", self.folder / "run", says=["1 of 3", "--repair"])
        printed = self.resume("run")
        self.assertRegex(printed, "step-00000008 is damaged: model.safetensors has 1000 bytes.*it is step-00000008.damaged now")
        self.assertIn("resumed after step 6", printed)
        self.same_but_times("whole", "run")
        self.assertEqual(self.model("whole"), self.model("run"))
        self.assertTrue((snapshots / "step-00000008.damaged").is_dir())
        self.assertEqual(self.snug("snapshots", self.folder / "run").stdout.count("whole"), 3)
        self.refuses(2, "snapshots", self.folder / "run", "--run", self.folder / "run", says=["run"])

    def test_snapshots_that_are_damaged_are_set_aside_where_that_is_asked_for(self):
        self.train("run")
        snapshots = self.folder / "run" / "snapshots"
        for name in ("step-00000006", "step-00000008"):
            (snapshots / name / "manifest.json").unlink()
        done = self.snug("snapshots", "--run", self.folder / "run", "--repair")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sorted(p.name for p in snapshots.iterdir()), ["step-00000004", "step-00000006.damaged", "step-00000008.damaged"])
        self.assertIn("resumed after step 4", self.resume("run"))

    def test_where_no_snapshot_is_whole_nothing_is_changed(self):
        self.train("run")
        snapshots = self.folder / "run" / "snapshots"
        for folder in snapshots.iterdir():
            (folder / "manifest.json").unlink()
        self.refuses(1, "train", "--resume", "--out", self.folder / "run", says=["step-00000004", "start anew"])
        self.assertEqual(sorted(p.name for p in snapshots.iterdir()), ["step-00000004", "step-00000006", "step-00000008"])

    def test_a_manifest_that_is_nested_without_end_is_named(self):
        self.train("run")
        deep = "[" * 1000000 + "]" * 1000000
        (self.folder / "run" / "snapshots" / "step-00000008" / "manifest.json").write_text(
            f'{{"format":{deep},"version":1,"step":8,"files":{{}}}}')
        self.assertRegex(self.resume("run"), "step-00000008 is damaged: its manifest")
        (self.folder / "run" / "plan.json").write_text(
            f'{{"snug_step_plan":1,"budget_bytes":1,"considered":"","choice":{deep}}}')
        self.refuses(2, "plan", "--run", self.folder / "run", says=["plan again"])


if __name__ == "__main__":
    main(__doc__)
