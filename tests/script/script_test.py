#!/usr/bin/env python3
"""Tests the scripts: each runs in a copy of its own, with programs on PATH that only write down how they were called.

usage: script_test.py ROOT
"""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1)).resolve()

# `python3 -m venv build/venv` makes an environment whose pip writes down what it is to install.
PYTHON = """#!/bin/sh
[ "$2" = venv ] || exit 0
mkdir -p "$3/bin" "$3/lib/python3.11/site-packages/torch"
printf '#!/bin/sh\\necho pip "$@" >> "$CALLS"\\n[ "$4" != /dev/stdin ] || cat >> "$CALLS"\\n' > "$3/bin/pip"
chmod +x "$3/bin/pip"
"""
RECORDER = '#!/bin/sh\necho "$(basename "$0")" "$@" >> "$CALLS"\n'


class Scripts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        shutil.copytree(ROOT / "script", self.root / "script")
        self.write("requirements.txt", "torch==2.13.0\nnumpy==2.4.6\n")
        self.write("packages.txt", "g++\n")
        self.program("python3", PYTHON)
        self.program("dpkg-query", "#!/bin/sh\necho install ok installed\n")
        self.program("cmake", RECORDER)
        self.program("ctest", RECORDER)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def program(self, name, text, folder="bin"):
        self.write(f"{folder}/{name}", text).chmod(0o755)

    def run_script(self, *args, status=0, **environment):
        """What the programs on PATH were called with, a line each, and what pip read."""
        calls = self.write("calls", "")
        clean = {k: v for k, v in os.environ.items() if k not in ("Torch_DIR", "CUDA_HOME", "CXX")}
        path = f"{self.root}/bin:/usr/bin:/bin"
        result = subprocess.run([str(self.root / "script" / args[0]), *args[1:]], capture_output=True, text=True,
                                env={**clean, "PATH": path, "CALLS": str(calls), **environment})
        self.output = result.stdout + result.stderr
        self.assertEqual(result.returncode, status, self.output)
        return calls.read_text()

    def test_setup_does_nothing_the_second_time(self):
        self.assertIn("torch==2.13.0", self.run_script("setup"))
        self.assertEqual(self.run_script("setup"), "")

    def test_setup_installs_torch_once_torch_dir_is_no_longer_set(self):
        with_torch_dir = self.run_script("setup", Torch_DIR="/libtorch")
        self.assertIn("numpy", with_torch_dir)
        self.assertNotIn("torch==", with_torch_dir)
        self.assertEqual(self.run_script("setup", Torch_DIR="/libtorch"), "")
        self.assertIn("torch==2.13.0", self.run_script("setup"))

    def test_setup_makes_another_torch_an_environment_of_its_own_once(self):
        self.assertEqual(self.run_script("setup", "--torch", "2.11.0"), "pip install -q --no-deps torch==2.11.0\n")
        self.assertEqual(self.run_script("setup", "--torch", "2.11.0"), "")

    def test_setup_installs_the_libraries_of_the_zoo_if_asked_and_never_their_torch(self):
        self.assertNotIn("zoo", self.run_script("setup"))
        self.assertEqual(self.run_script("setup", "--zoo"), "pip install -q --no-deps -r requirements-zoo.txt\n")

    def test_test_leaves_the_slow_tests_out_unless_told(self):
        self.assertIn("ctest --preset dev\n", self.run_script("test"))
        self.assertIn("ctest --preset all\n", self.run_script("test", "--all"))
        self.assertIn("--label-exclude slow\n", self.run_script("test", "--torch", "2.11.0"))
        self.assertNotIn("--label-exclude", self.run_script("test", "--all", "--torch", "2.11.0"))
        self.assertNotIn("--label-exclude", self.run_script("test", "--torch", "2.11.0", "--all"))

    def test_sanitize_runs_all_modules_or_those_it_is_told(self):
        calls = self.run_script("sanitize")
        self.assertIn("cmake --build --preset asan-torch\n", calls)
        self.assertRegex(calls, "ctest --test-dir build/asan-torch .*-LE slow\\|package\n")
        self.assertRegex(calls, "cmake --build --preset tsan-torch --target .*test_distributed")
        calls = self.run_script("sanitize", "--part", "address", "activations", "optim")
        self.assertIn("cmake --build --preset asan-torch --target test_activations test_optim\n", calls)
        self.assertRegex(calls, r"ctest --test-dir build/asan-torch .*-R \^\(activations\|optim\)\$\n")
        self.assertNotIn("tsan", calls)

    def test_test_with_another_torch_is_not_misled_by_the_shell(self):
        calls = self.run_script("test", "--torch", "2.11.0", Torch_DIR="/libtorch")
        self.assertIn(f"-DTorch_DIR={self.root.resolve()}/build/venv-2.11.0/lib/python3.11/site-packages/torch\n", calls)

    def cuda(self, nvcc):
        self.write("cuda/include/cuda_runtime_api.h", "")
        self.write("src/kernels/a.cu", "")
        if nvcc:
            self.program("nvcc", nvcc, folder="cuda/bin")
        return str(self.root / "cuda")

    def test_check_cuda_compiles_every_kernel(self):
        calls = self.run_script("check-cuda", "--kernels", CUDA_HOME=self.cuda(RECORDER))
        self.assertRegex(calls, r"nvcc .*-std=c\+\+20 .*-c .*src/kernels/a\.cu\n")

    def test_check_cuda_fails_where_a_kernel_does_not_compile(self):
        self.run_script("check-cuda", "--kernels", status=1, CUDA_HOME=self.cuda("#!/bin/sh\nexit 2\n"))
        self.assertIn("src/kernels/a.cu does not compile", self.output)

    def test_check_cuda_says_what_is_missing(self):
        self.run_script("check-cuda", "--kernels", status=77, CUDA_HOME="/nowhere")
        self.assertIn("no CUDA toolkit", self.output)
        self.run_script("check-cuda", "--kernels", status=77, CUDA_HOME=self.cuda(None))
        self.assertIn("no nvcc", self.output)

    def test_check_cuda_wants_the_cuda_build_of_torch(self):
        self.run_script("check-cuda", status=77, CUDA_HOME=self.cuda(RECORDER))
        self.assertIn("is no CUDA build of torch", self.output)

    def test_every_script_refuses_an_argument_it_does_not_know(self):
        for script in ("setup", "test", "sanitize", "torture", "check-cuda"):
            self.run_script(script, "--nonsense", status=2)
            self.assertIn("usage:", self.output)


class Sources(unittest.TestCase):
    def test_no_test_hides_the_exit_status_of_its_program(self):
        # CTest ignores the exit status where PASS_REGULAR_EXPRESSION is set.
        for folder in ("src", "program", "bindings", "python", "tests", "examples", "benchmarks", "cmake"):
            files = [*(ROOT / folder).rglob("CMakeLists.txt"), *(ROOT / folder).rglob("*.cmake")]
            self.assertTrue(files, folder)
            for path in files:
                self.assertNotIn("PASS_REGULAR_EXPRESSION", path.read_text(), path)


if __name__ == "__main__":
    unittest.main()
