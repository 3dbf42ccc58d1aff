"""`snug launch` as its users meet it, with small programs that need no LibTorch.

usage: launch_test.py PATH-OF-SNUG [unittest arguments]
"""

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
PYTHON = [sys.executable, "-c"]


class LaunchTest(unittest.TestCase):
    def environment(self, **more):
        kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MASTER_PORT", "SNUG_JOB_TOKEN")}
        return {**kept, "COLUMNS": "120", **more}

    def launch(self, *arguments, **environment):
        return subprocess.run([SNUG, "launch", *arguments], capture_output=True, text=True, timeout=60,
                              env=self.environment(**environment))

    def test_help_is_as_recorded_and_fits_a_screen(self):
        shown = self.launch("--help").stdout
        golden = GOLDEN / "help_launch.txt"
        if os.environ.get("SNUG_UPDATE_GOLDEN"):
            golden.write_text(shown)
        self.assertEqual(shown, golden.read_text())
        self.assertLessEqual(len(shown.splitlines()), 40)

    def test_each_rank_has_torchruns_variables(self):
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"]
        done = self.launch("-n", "3", "--", *PYTHON, f"import os; print(*[os.environ[n] for n in {names}])")
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        lines = sorted(line.split() for line in done.stdout.splitlines())
        self.assertEqual([line[:6] for line in lines], [[f"[{r}]", str(r), str(r), "3", "3", "127.0.0.1"] for r in range(3)])
        ports, threads = {line[6] for line in lines}, {line[7] for line in lines}
        self.assertEqual(len(ports), 1)
        self.assertGreater(int(ports.pop()), 1024)
        self.assertEqual(threads, {str(max(1, os.cpu_count() // 3))})

    def test_launchers_on_several_machines_share_out_the_ranks(self):
        program = "import os; print(*[os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')])"
        lines = []
        for node in ("0", "1"):
            done = self.launch("-n", "2", "--nodes", "2", "--node-rank", node, "--rendezvous", "node0:4321", "--", *PYTHON, program)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            lines += done.stdout.splitlines()
        self.assertEqual(sorted(lines), [f"[{rank}] {rank} {rank % 2} 4 2 node0 4321" for rank in range(4)])
        done = self.launch("-n", "2", "--nodes", "2", "--node-rank", "1", "--rendezvous", "node0:4321", "--", "sh", "-c", "exit $LOCAL_RANK")
        self.assertIn("rank 3 ended with status 1", done.stderr)

    def test_leaves_a_number_of_threads_and_takes_a_port_that_are_given(self):
        done = self.launch("-n", "1", "--port", "4321", "--", "sh", "-c", "echo $OMP_NUM_THREADS $MASTER_PORT",
                           OMP_NUM_THREADS="7")
        self.assertEqual(done.stdout, "[0] 7 4321\n")

    def test_the_ranks_of_a_job_have_a_token_of_their_own(self):
        def tokens(*flags, token=None):
            done = self.launch(*flags, "--", "sh", "-c", "echo token=$SNUG_JOB_TOKEN", **({"SNUG_JOB_TOKEN": token} if token else {}))
            return {line.split("token=")[1] for line in done.stdout.splitlines()}
        first, second = tokens("-n", "2"), tokens("-n", "2")
        self.assertEqual((len(first), len(second), len(first | second)), (1, 1, 2), "one for a job")
        self.assertRegex(*first, "^[0-9a-f]{32}$")
        self.assertEqual(tokens("-n", "1", token="mine"), {"mine"})
        self.assertEqual(tokens("--nodes", "2", "--node-rank", "1", "--rendezvous", "localhost:1"), {""}, "others could not know it")

    def test_arguments_reach_the_program_as_they_are(self):
        words = ["--help", "-n", "--", "[1,2]", "", "a b", "--ranks=3"]
        done = self.launch("-n", "1", "--", *PYTHON, "import sys; print(sys.argv[1:])", *words)
        self.assertEqual(done.stdout, f"[0] {words}\n", done.stderr)

    def test_output_keeps_its_stream_and_its_lines(self):
        program = r"import sys; sys.stdout.write('a' * 100000 + '\nb\n\nno end'); sys.stderr.write('c\n')"
        done = self.launch("-n", "2", "--", *PYTHON, program)
        self.assertEqual(done.returncode, 0)
        for rank in (0, 1):
            mine = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]
            self.assertEqual(mine, [f"[{rank}] {text}" for text in ("a" * 100000, "b", "", "no end")])
        self.assertEqual(sorted(done.stderr.splitlines()), ["[0] c", "[1] c"])

    def test_names_the_rank_that_failed_and_stops_the_others(self):
        start = time.monotonic()
        done = self.launch("-n", "3", "--", "sh", "-c", "if [ $RANK = 1 ]; then exit 5; fi; sleep 50")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr, "snug: launch: rank 1 ended with status 5; the others were stopped\n")
        self.assertLess(time.monotonic() - start, 40)
        done = self.launch("-n", "2", "--", "sh", "-c", "if [ $RANK = 0 ]; then kill -9 $$; fi; sleep 50")
        self.assertIn("rank 0 was killed by signal 9", done.stderr)

    def test_leaves_no_process_behind(self):
        with tempfile.TemporaryDirectory() as folder:
            pid = pathlib.Path(folder) / "pid"
            done = self.launch("-n", "1", "--", "sh", "-c", f"sleep 50 >/dev/null 2>&1 & echo $! > {pid}; exit 3")
            self.assertEqual(done.returncode, 1)
            child = int(pid.read_text())
            for _ in range(100):
                try:
                    state = pathlib.Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0]
                except FileNotFoundError:
                    return
                if state == "Z":
                    return
                time.sleep(0.05)
            self.fail("it lives on")

    def test_starts_all_again(self):
        with tempfile.TemporaryDirectory() as folder:
            program = f"echo try >> {folder}/$RANK; [ $(wc -l < {folder}/$RANK) = 3 ]"
            done = self.launch("-n", "1", "--max-restarts", "1", "--", "sh", "-c", program)
            self.assertEqual(done.returncode, 1)
            self.assertIn("rank 0 ended with status 1; starting all again, 1 of 1", done.stderr)
        with tempfile.TemporaryDirectory() as folder:
            program = f"echo try >> {folder}/$RANK; [ $(wc -l < {folder}/$RANK) = 3 ]"
            self.assertEqual(self.launch("-n", "1", "--max-restarts", "2", "--", "sh", "-c", program).returncode, 0)

    def test_passes_signals_on_once(self):
        program = ("import signal, sys, time\n"
                   "def end(number, _):\n  print('got', number, flush=True); time.sleep(0.3); sys.exit(4)\n"
                   "signal.signal(signal.SIGINT, end); signal.signal(signal.SIGTERM, end)\n"
                   "print('ready', flush=True); time.sleep(50)\n")
        for number in (signal.SIGINT, signal.SIGTERM):
            with subprocess.Popen([SNUG, "launch", "-n", "2", "--", *PYTHON, program], stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True, env=self.environment()) as launcher:
                self.assertEqual(sorted(launcher.stdout.readline() for _ in range(2)), ["[0] ready\n", "[1] ready\n"])
                launcher.send_signal(number)
                out, err = launcher.communicate(timeout=60)
            self.assertEqual(sorted(out.splitlines()), [f"[{rank}] got {int(number)}" for rank in range(2)])
            self.assertEqual((launcher.returncode, err), (128 + number, ""))

    def test_passes_the_second_interrupt_on_and_kills_who_does_not_end_by_it(self):
        program = ("import signal, sys, time\n"
                   "count = 0\n"
                   "def end(*_):\n  global count; count += 1; print('got', count, flush=True)\n"
                   "  if count == 2 and STUBBORN == 0: sys.exit(7)\n"
                   "signal.signal(signal.SIGINT, end)\n"
                   "print('ready', flush=True)\n"
                   "while True: time.sleep(50)\n")
        for stubborn in (0, 1):
            with subprocess.Popen([SNUG, "launch", "-n", "1", "--", *PYTHON, program.replace("STUBBORN", str(stubborn))],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environment()) as launcher:
                for line in ("ready", "got 1", "got 2"):
                    self.assertEqual(launcher.stdout.readline(), f"[0] {line}\n")
                    if line == "got 1":
                        time.sleep(0.2)  # what comes within a tenth of a second is one
                    if line != "got 2":
                        launcher.send_signal(signal.SIGINT)
                _, err = launcher.communicate(timeout=60)
            self.assertEqual((launcher.returncode, err), (130, ""))

    def test_leaves_ignored_what_is_ignored_and_so_do_its_ranks(self):
        ignored = {signal.SIGHUP, signal.SIGINT}

        def ignore():
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)

        program = "grep SigIgn /proc/self/status; echo ready; read line < FIFO"
        with tempfile.TemporaryDirectory() as folder:
            fifo = pathlib.Path(folder) / "fifo"
            os.mkfifo(fifo)
            with subprocess.Popen([SNUG, "launch", "-n", "1", "--", "sh", "-c", program.replace("FIFO", str(fifo))],
                                  stdout=subprocess.PIPE, text=True, env=self.environment(), preexec_fn=ignore) as launcher:
                mask = int(launcher.stdout.readline().split()[-1], 16)
                self.assertEqual(launcher.stdout.readline(), "[0] ready\n")
                for number in ignored:
                    launcher.send_signal(number)
                fifo.write_text("go on\n")
                self.assertEqual(launcher.wait(timeout=60), 0)
        known = (*ignored, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ)
        self.assertEqual({number for number in known if mask >> (number - 1) & 1}, ignored)

    def test_goes_on_where_nobody_reads_its_output(self):
        with tempfile.TemporaryDirectory() as folder:
            end = pathlib.Path(folder) / "end"
            program = f"echo first; read line < {folder}/fifo; echo second; echo third; echo end > {end}"
            os.mkfifo(f"{folder}/fifo")
            with subprocess.Popen([SNUG, "launch", "-n", "1", "--", "sh", "-c", program], stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True, env=self.environment()) as launcher:
                self.assertEqual(launcher.stdout.readline(), "[0] first\n")
                launcher.stdout.close()
                pathlib.Path(folder, "fifo").write_text("go on\n")
                self.assertRegex(launcher.stderr.read(), r"\Asnug: standard output cannot be written: [^\n]+\n\Z")
                self.assertEqual(launcher.wait(timeout=60), 0)
            self.assertTrue(end.exists())

    def test_heeds_a_signal_while_a_rank_writes_without_end(self):
        with subprocess.Popen([SNUG, "launch", "-n", "1", "--", "yes", ""], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              env=self.environment()) as launcher:
            launcher.stdout.read(1 << 20)
            launcher.send_signal(signal.SIGINT)
            launcher.communicate(timeout=60)  # as fast as it can, and yet slower than yes
        self.assertEqual(launcher.returncode, 130)

    def test_shows_a_line_that_never_ends_in_pieces(self):
        program = "import sys\nfor _ in range(5): sys.stdout.write('a' * (1 << 20))"
        done = self.launch("-n", "1", "--", *PYTHON, program)
        lines = done.stdout.splitlines()
        self.assertGreater(len(lines), 1)
        self.assertEqual({line[:4] for line in lines}, {"[0] "})
        self.assertEqual("".join(line[4:] for line in lines), "a" * (5 << 20))

    def test_bad_usage_is_refused_in_one_line(self):
        for arguments, word in ((["-n", "2"], "after --"), (["-n", "2", "true"], "true"), (["-n", "0", "--", "true"], "0"),
                                (["--rank", "2", "--", "true"], "--ranks"), (["--max-restarts", "-1", "--", "true"], "-1"),
                                (["--nodes", "2", "--", "true"], "--rendezvous"),
                                (["--node-rank", "1", "--", "true"], "--node-rank is 1 of 1"),
                                (["--nodes", "2", "--rendezvous", "host", "--", "true"], "HOST:PORT"),
                                (["--nodes", "2", "--rendezvous", "host:port", "--", "true"], "'host:port'"),
                                (["--nodes", "2", "--rendezvous", "host:29500abc", "--", "true"], "'host:29500abc'"),
                                (["--nodes", "2", "--rendezvous", ":29500", "--", "true"], "':29500'")):
            with self.subTest(arguments):
                done = self.launch(*arguments)
                self.assertEqual((done.returncode, done.stdout), (2, ""))
                self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
                self.assertIn(word, done.stderr)

    def test_a_program_that_is_not_there_is_named(self):
        done = self.launch("-n", "1", "--", "/no/such/program")
        self.assertEqual(done.returncode, 1)
        self.assertIn("cannot start '/no/such/program'", done.stderr)


if __name__ == "__main__":
    if SNUG is None:
        sys.exit(__doc__)
    unittest.main()
