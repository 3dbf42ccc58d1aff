"""Builds the extension with CMake, against the torch that is installed here: `pip install --no-build-isolation ./python`.

SNUG_BUILD_DIR=FOLDER takes a build folder of snug that is there already, and builds only what it lacks. An sdist has the C++ sources in the
folder `source`.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import torch
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE / "source" if (HERE / "source").exists() else HERE.parent
TORCH = ".".join(torch.__version__.split(".")[:2])


class CMakeBuild(build_ext):
    def run(self):
        given = os.environ.get("SNUG_BUILD_DIR")
        folder = pathlib.Path(given or self.build_temp).resolve()
        for program in ("cmake",) if given else ("cmake", "ninja"):
            if shutil.which(program) is None:
                sys.exit(f"snug: {program} is not on PATH: pip install cmake ninja, in an environment whose bin is on PATH")
        if not given:
            subprocess.run(["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}",
                            f"-DTorch_DIR={torch.utils.cmake_prefix_path}/Torch", "-DSNUG_BUILD_CLI=OFF", "-DSNUG_BUILD_C=OFF",
                            "-DSNUG_BUILD_PYTHON=REQUIRED", "-DSNUG_BUILD_TESTS=OFF", "-DSNUG_BUILD_EXAMPLES=OFF"], check=True)
        subprocess.run(["cmake", "--build", folder, "--target", "snug_python"], check=True)
        target = pathlib.Path(self.get_ext_fullpath("snug._snug")).resolve().parent.parent
        subprocess.run(["cmake", "--install", folder, "--component", "python", "--prefix", target], check=True)
        library = target / "snug" / "libsnug.so.0"  # a link, which a wheel would have as a second copy
        library.resolve().replace(library)


class WithSources(sdist):
    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        source = pathlib.Path(base_dir, "source")
        for name in ("cmake", "include", "python", "src"):
            unwanted = shutil.ignore_patterns("build", "dist", "*.egg-info", "__pycache__", source.parent.name)
            shutil.copytree(ROOT / name, source / name, ignore=unwanted)
        for name in ("CMakeLists.txt", "LICENSE"):
            shutil.copy(ROOT / name, source)


version = re.search(r"project\(snug VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)
of_torch = "" if "sdist" in sys.argv else f"+torch{TORCH}"
setup(version=version + of_torch, install_requires=[f"torch=={TORCH}.*"], ext_modules=[Extension("snug._snug", [])],
      cmdclass={"build_ext": CMakeBuild, "sdist": WithSources})
