"""`snug train` on several ranks, however they are started, and what becomes of a run when one of them is killed.

usage: ranks_test.py PATH-OF-SNUG [unittest arguments]
"""

import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import time
import unittest

from program import ENVIRONMENT, SMALL, SNUG, SnugTest, TIMES, main

TORCHRUN = pathlib.Path(__file__).resolve().parents[2] / "build" / "venv" / "bin" / "torchrun"
OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


class RanksTest(SnugTest):
    def train_command(self, out, *arguments):
        return [SNUG, "train", "--data", self.text, "--out", self.folder / out, *SMALL, *arguments]

    def started(self, ranks, command, names=TORCH):
        port = str(free_port())
        return [subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                 env={**ENVIRONMENT, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
                                      names[0]: str(rank), names[1]: str(ranks), names[2]: str(rank)})
                for rank in range(ranks)]

    def ended(self, processes):
        """(status, output, errors) of each."""
        done = [process.communicate(timeout=120) for process in processes]
        return [(process.returncode, *texts) for process, texts in zip(processes, done)]

    def launch(self, *arguments):
        return subprocess.Popen([SNUG, "launch", *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env={**ENVIRONMENT, "OMP_NUM_THREADS": "1"})

    def steps(self, out):
        return [record for record in self.records(out) if "event" not in record]

    def goes_as(self, one, other):
        """The same run, but for the order of sums."""
        a, b = self.steps(one), self.steps(other)
        self.assertEqual(len(a), len(b))
        for x, y in zip(a, b):
            self.assertAlmostEqual(x["loss"], y["loss"], delta=2e-5 * x["loss"])
            self.assertEqual((x["items"], x["stepped"]), (y["items"], y["stepped"]))
        self.assertAlmostEqual(a[-1]["validation_loss"], b[-1]["validation_loss"], delta=2e-5 * a[-1]["validation_loss"])

    def same_bits(self, one, other):
        strip = lambda out: [{k: v for k, v in r.items() if k not in TIMES | {"communication", "peak_bytes", "memory",
                                                                             "activation_peak_bytes"}} for r in self.steps(out)]
        self.assertEqual(strip(one), strip(other))
        self.assertEqual(*((self.folder / out / "model.safetensors").read_bytes() for out in (one, other)))

    def log_has(self, out, lines):
        log = self.folder / out / "log.jsonl"
        return log.exists() and log.read_bytes().count(b"\n") >= lines


class Started(RanksTest):
    def test_by_hand_by_open_mpi_or_by_the_launcher_trains_as_one_rank_does(self):
        self.train("one", "--accumulate", "3")
        launched = self.launch("-n", "3", "--", *self.train_command("launched", "--micro-batch", "2"))
        out, err = launched.communicate(timeout=120)
        self.assertEqual((launched.returncode, err), (0, ""), err)
        self.assertEqual({line[:4] for line in out.splitlines()}, {"[0] "})  # one speaks
        self.goes_as("one", "launched")
        for status, _, err in self.ended(self.started(2, self.train_command("mpi", "--accumulate", "3"), OPEN_MPI)):
            self.assertEqual((status, err), (0, ""))
        self.goes_as("one", "mpi")
        # Each sends every gradient once a step, whatever the number of micro-batches, and the report says so.
        sent = {record["communication"]["bytes_sent"] for out in ("launched", "mpi") for record in self.steps(out)}
        self.assertEqual(len(sent), 1)
        self.assertNotIn("communication", self.steps("one")[0])
        self.assertIn("Gradients sent", (self.folder / "mpi" / "report.html").read_text())
        self.assertNotIn("Gradients sent", (self.folder / "one" / "report.html").read_text())

    @unittest.skipUnless(TORCHRUN.exists(), "there is no torchrun")
    def test_by_torchrun(self):
        self.train("one", "--steps", "2")
        done = subprocess.run([TORCHRUN, "--no-python", "--nproc-per-node", "2", "--master-port", str(free_port()),
                               *map(str, self.train_command("run", "--steps", "2"))], capture_output=True, text=True,
                              env=ENVIRONMENT, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.goes_as("one", "run")

    @unittest.skipUnless(shutil.which("mpirun"), "there is no mpirun")
    def test_by_mpirun(self):
        self.train("one", "--steps", "2")
        done = subprocess.run(["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2",
                               *map(str, self.train_command("run", "--steps", "2"))], capture_output=True, text=True,
                              env=ENVIRONMENT, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.goes_as("one", "run")

    def test_by_two_launchers(self):
        self.train("one", "--steps", "2")
        port = free_port()
        nodes = [self.launch("-n", "1", "--nodes", "2", "--node-rank", node, "--rendezvous", f"127.0.0.1:{port}", "--",
                             *self.train_command("run", "--steps", "2")) for node in (0, 1)]
        (first, out, _), (second, silence, _) = self.ended(nodes)
        self.assertEqual((first, second, silence), (0, 0, ""))
        self.assertIn("[0] done", out)
        self.goes_as("one", "run")

    def test_resumes_on_another_number_of_ranks(self):
        self.train("one")
        for status, _, err in self.ended(self.started(3, self.train_command("run", "--steps", "8"))):
            self.assertEqual((status, err), (0, ""))
        shutil.rmtree(self.folder / "run" / "snapshots" / "step-00000008")
        shutil.rmtree(self.folder / "run" / "snapshots" / "step-00000006")
        resume = [SNUG, "train", "--resume", "--out", self.folder / "run"]
        ended = self.ended(self.started(2, resume))
        for status, _, err in ended:
            self.assertEqual((status, err), (0, ""))
        self.assertIn("goes on with ranks 2, not 3: from here on, losses and weights may differ", ended[0][1])
        self.goes_as("one", "run")


class Sharded(RanksTest):
    def train_on(self, ranks, command):
        for status, _, err in self.ended(self.started(ranks, command)):
            self.assertEqual((status, err), (0, ""))

    def test_gives_the_same_bits_with_half_of_the_state_on_each_rank(self):
        for out, flags in (("whole", ()), ("shares", ("--shard-optimizer",))):
            self.train_on(2, self.train_command(out, *flags))
        self.same_bits("whole", "shares")
        whole, share = (self.steps(out)[-1]["memory"]["optimizer_state"] for out in ("whole", "shares"))
        self.assertAlmostEqual(share / whole, 0.5, delta=0.01)
        # What rank 0 has gathered for the snapshot of step 6 is gone in step 7.
        sixth, seventh = (step["peak_bytes"] for step in self.steps("shares")[5:7])
        self.assertLess(seventh - sixth, whole / 2)

    def test_resumes_on_fewer_ranks_and_alone(self):
        self.train("one")
        command = self.train_command("run", "--shard-optimizer")
        self.train_on(3, command)
        for ranks, last in ((2, 6), (1, 4)):
            for step in range(last + 2, 9, 2):
                shutil.rmtree(self.folder / "run" / "snapshots" / f"step-{step:08}")
            self.train_on(ranks, [SNUG, "train", "--resume", "--out", self.folder / "run"])
            self.goes_as("one", "run")

    def test_saves_and_resumes_within_the_limit_in_which_it_trains(self):
        command = self.train_command("run", "--shard-optimizer", "--batch", "2", "--memory", "19MiB")
        self.train_on(2, command)
        for step in (6, 8):
            shutil.rmtree(self.folder / "run" / "snapshots" / f"step-{step:08}")
        last = self.steps("run")[-1]
        self.train_on(2, [SNUG, "train", "--resume", "--out", self.folder / "run"])
        self.assertEqual(self.steps("run")[-1]["validation_loss"], last["validation_loss"])

    def test_trains_saves_and_resumes_within_less_than_weights_gradients_and_state(self):
        self.train("one")
        out = self.folder / "run"
        launched = self.launch("-n", "2", "--", *self.train_command("run", "--memory", "11MiB"))
        said, err = launched.communicate(timeout=120)
        self.assertEqual(launched.returncode, 0, err)
        self.assertIn("weights in shards", said)
        self.goes_as("one", "run")
        weights = self.steps("one")[-1]["memory"]["parameters"]
        self.assertGreater(4 * weights, 11 << 20)
        memory = self.steps("run")[-1]["memory"]
        self.assertLess(memory["parameters"], 0.6 * weights)
        self.assertLess(memory["optimizer_state"], 0.6 * 2 * weights)
        self.assertIn("its share of the weights", self.events("run", "plan")[-1]["explanation"])
        model, last = (out / "model.safetensors").read_bytes(), self.steps("run")[-1]
        for ranks in (2, 3, 1):
            for step in (6, 8):
                shutil.rmtree(out / "snapshots" / f"step-{step:08}")
            resume = [SNUG, "train", "--resume", "--out", out]
            self.train_on(ranks, resume if ranks > 1 else [*resume, "--memory", "30MiB"])
            self.goes_as("one", "run")
            if ranks == 2:
                self.assertEqual((out / "model.safetensors").read_bytes(), model)
                self.assertEqual(self.steps("run")[-1]["validation_loss"], last["validation_loss"])

    def test_trains_in_two_groups_and_resumes_in_one(self):
        self.train("one")
        self.train_on(4, self.train_command("run", "--memory", "11MiB", "--shard-group", "2"))
        self.goes_as("one", "run")
        self.assertIn("in each of 2 groups has its share of the weights", self.events("run", "plan")[-1]["explanation"])
        weights, share = (self.steps(out)[-1]["memory"]["parameters"] for out in ("one", "run"))
        self.assertLess(0.4 * weights, share)
        shutil.rmtree(self.folder / "run" / "snapshots" / "step-00000008")
        resume = [SNUG, "train", "--resume", "--out", self.folder / "run"]
        for status, _, err in self.ended(self.started(3, resume)):
            self.assertEqual(status, 2)
            self.assertIn("shard_group is 2, of 3 ranks", err)
        self.train_on(3, [*resume, "--shard-group", "0"])
        self.goes_as("one", "run")

    def test_alone_is_refused(self):
        self.refuses(2, *self.train_command("run", "--shard-optimizer")[1:], says=["shard_optimizer"])
        self.refuses(2, *self.train_command("run", "--shard-group", "2")[1:], says=["shard_group"])


class Killed(RanksTest):
    def test_one_ends_all_with_its_name_and_the_run_can_be_resumed(self):
        self.train("one", "--steps", "30")
        for number, flags in ((0, ()), (1, ()), (0, ("--memory", "11MiB")), (1, ("--memory", "11MiB"))):
            with self.subTest(number=number, flags=flags):
                out = f"run{number}{len(flags)}"
                processes = self.started(2, self.train_command(out, "--steps", "30", *flags))
                lines = random.randint(2, 20)
                while not self.log_has(out, lines):
                    time.sleep(0.002)
                processes[number].kill()
                start = time.monotonic()
                ends = self.ended(processes)
                self.assertLess(time.monotonic() - start, 60)
                status, _, err = ends[1 - number]
                self.assertEqual(status, 1, (lines, err))
                self.assertIn(f"rank {number} has died", err)
                more = ("--memory", "30MiB") if flags else ()
                self.assertEqual(self.snug("train", "--resume", "--out", self.folder / out, *more).returncode, 0)
                self.goes_as("one", out)

    def test_one_makes_the_launcher_start_all_again_and_they_go_on_to_the_same_bits(self):
        for name, restarts in (("whole", 0), ("killed", 1)):
            command = self.train_command(name, "--steps", "30")
            # Each rank leaves the number of its process.
            script = f'echo $$ > {self.folder}/{name}-$RANK; exec "$@"'
            launched = self.launch("-n", "2", "--max-restarts", restarts, "--", "sh", "-c", script, "sh", *command)
            if restarts:
                while not self.log_has(name, 12):
                    time.sleep(0.002)
                os.kill(int((self.folder / f"{name}-1").read_text()), signal.SIGKILL)
            out, err = launched.communicate(timeout=120)
            self.assertEqual(launched.returncode, 0, err)
        self.assertIn("rank 1 was killed by signal 9", err)
        self.assertIn("resumed after step", out)
        self.same_bits("whole", "killed")

    def test_one_makes_the_launchers_of_all_machines_start_again(self):
        port = free_port()
        script = f'echo $$ > {self.folder}/$RANK; exec "$@"'
        nodes = [self.launch("-n", "1", "--nodes", "2", "--node-rank", node, "--rendezvous", f"127.0.0.1:{port}", "--max-restarts", 1,
                             "--", "sh", "-c", script, "sh", *self.train_command("run", "--steps", "30")) for node in (0, 1)]
        for node in nodes:
            self.addCleanup(node.kill)
        while not self.log_has("run", 12):
            time.sleep(0.002)
        os.kill(int((self.folder / "1").read_text()), signal.SIGKILL)
        (first, out, notice), (second, _, err) = self.ended(nodes)
        self.assertEqual((first, second), (0, 0), notice + err)
        self.assertIn("rank 1 was killed by signal 9", err)
        self.assertIn("resumed after step", out)

    def test_an_interrupted_rank_stops_all_with_a_snapshot(self):
        processes = self.started(2, self.train_command("run", "--steps", "80"))
        while not self.log_has("run", 3):
            time.sleep(0.002)
        processes[1].send_signal(signal.SIGTERM)
        ends = self.ended(processes)
        self.assertEqual([status for status, _, _ in ends], [143, 143], ends)
        self.assertIn("Go on with", ends[0][1])
        last = len(self.steps("run"))
        self.assertTrue((self.folder / "run" / "snapshots" / f"step-{last:08}").exists())


class Waiting(RanksTest):
    def test_for_ever_is_longer_than_any_timeout(self):
        for seconds in ("1e10", "inf"):
            ends = self.ended(self.started(2, self.train_command(f"run{seconds}", "--steps", "1", "--timeout", seconds)))
            self.assertEqual([status for status, _, _ in ends], [0, 0], ends)


class Refused(RanksTest):
    def test_by_all_with_the_reason_on_the_rank_that_has_it(self):
        self.train("run")
        first, second = self.ended(self.started(2, self.train_command("run")))
        self.assertEqual((first[0], second[0]), (2, 1))
        self.assertIn("there already", first[2])
        self.assertIn("rank 0 has died", second[2])

    def test_what_cannot_work(self):
        for environment, word in (({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2"), ({"RANK": "0"}, "WORLD_SIZE")):
            done = subprocess.run(list(map(str, self.train_command("run"))), capture_output=True, text=True,
                                  env={**ENVIRONMENT, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **environment}, timeout=60)
            self.assertEqual(done.returncode, 2)
            self.assertIn(word, done.stderr)
        done = self.launch("-n", "4", "--", *self.train_command("run", "--accumulate", str(1 << 62)))
        self.assertIn("must divide", done.communicate(timeout=60)[1])
        done = self.launch("-n", "2", "--", *self.train_command("run", "--accumulate", "2"))
        self.assertIn("on 2 ranks", done.communicate(timeout=60)[1])


if __name__ == "__main__":
    main(__doc__)
