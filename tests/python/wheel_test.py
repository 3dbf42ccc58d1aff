"""A wheel of the package is built from a build folder, installed somewhere, and works there.

usage: wheel_test.py SOURCE BUILD
"""

import os
import pathlib
import subprocess
import sys
import tempfile


def main():
    source, build = map(pathlib.Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "source")
        copy.mkdir()
        for name in ("python", "CMakeLists.txt"):  # pip writes beside what it builds
            subprocess.run(["cp", "-r", source / name, copy], check=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
        subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, copy / "python"], check=True,
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
