"""An sdist of the package has all that CMake needs. A wheel of it is built with a build folder, installed somewhere, and works there.

usage: wheel_test.py SOURCE BUILD
"""

import os
import pathlib
import subprocess
import sys
import tempfile

import torch


def main():
    source, build = map(pathlib.Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "source")
        copy.mkdir()
        for name in ("python", "cmake", "include", "src", "CMakeLists.txt", "LICENSE"):  # pip writes beside what it builds
            subprocess.run(["cp", "-r", source / name, copy], check=True)
        subprocess.run([sys.executable, "setup.py", "-q", "sdist", "-d", folder], check=True, cwd=copy / "python")
        (sdist,) = pathlib.Path(folder).glob("snug-*.tar.gz")
        subprocess.run(["rm", "-r", copy], check=True)
        subprocess.run(["tar", "-xf", sdist, "-C", folder], check=True)
        (unpacked,) = pathlib.Path(folder).glob("snug-*/source")
        configure = ["cmake", "-S", unpacked, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}",
                     f"-DTorch_DIR={torch.utils.cmake_prefix_path}/Torch", "-DSNUG_BUILD_CLI=OFF", "-DSNUG_BUILD_C=OFF",
                     "-DSNUG_BUILD_PYTHON=REQUIRED", "-DSNUG_BUILD_TESTS=OFF", "-DSNUG_BUILD_EXAMPLES=OFF"]
        subprocess.run([*configure, "-B", pathlib.Path(folder, "build")], check=True, stdout=subprocess.DEVNULL)
        refused = subprocess.run([*configure, "-B", pathlib.Path(folder, "refused"), "-DPython_INCLUDE_DIR=/nowhere"], text=True, capture_output=True)
        assert refused.returncode != 0 and "needs Python's headers" in " ".join(refused.stderr.split()), refused.stderr
        told = subprocess.run([sys.executable, "setup.py", "-q", "build_ext"], cwd=unpacked.parent, text=True, capture_output=True,
                              env={**os.environ, "PATH": "/nowhere"}).stderr.splitlines()[-1]
        assert told.startswith("snug: missing") and told.endswith("a C++20 compiler (Debian: apt-get install g++)"), told
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
        subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, sdist], check=True,
                       env={**os.environ, "SNUG_BUILD_DIR": str(build)})
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        site = pathlib.Path(folder, "site")
        subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", site, wheel], check=True)
        example = source / "examples" / "python" / "half_the_memory.py"
        environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
        output = subprocess.run([sys.executable, example], check=True, env=environment, cwd=folder, text=True, capture_output=True)
        print(output.stdout)
        names = "import snug, snug_export; print(snug.__file__, snug_export.__file__)"
        where = subprocess.run([sys.executable, "-c", names], check=True, env=environment, cwd=folder,
                               text=True, capture_output=True).stdout
        assert all(file.startswith(str(site)) for file in where.split()), where


if __name__ == "__main__":
    main()
