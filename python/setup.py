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
import sysconfig

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.sdist import sdist

if int(setuptools.__version__.split(".")[0]) < 70:
    sys.exit(f"snug: setuptools {setuptools.__version__} is too old: pip install 'setuptools>=70'")
try:
    import torch
except ModuleNotFoundError:
    sys.exit("snug: torch is missing, which snug is compiled against: pip install torch, then install snug with --no-build-isolation")

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE / "source" if (HERE / "source").exists() else HERE.parent
TORCH = ".".join(torch.__version__.split(".")[:2])


def missing():
    """What the build needs and this machine lacks."""
    compilers = os.environ.get("CXX", "").split()[:1] or ["c++", "g++", "clang++"]
    programs = {"cmake (pip install cmake)": ["cmake"], "ninja (pip install ninja)": ["ninja"],
                "a C++20 compiler (Debian: apt-get install g++)": compilers}
    headers = pathlib.Path(sysconfig.get_path("include"), "Python.h")
    absent = [what for what, names in programs.items() if not any(map(shutil.which, names))]
    return absent if headers.exists() else [*absent, "Python's headers (Debian: apt-get install python3-dev)"]


class CMakeBuild(build_ext):
    def run(self):
        given = os.environ.get("SNUG_BUILD_DIR")
        folder = pathlib.Path(given or self.build_temp).resolve()
        os.environ["PATH"] += os.pathsep + sysconfig.get_path("scripts")  # where pip puts cmake and ninja
        if not given:
            self.configure(folder)
        subprocess.run(["cmake", "--build", folder, "--target", "snug_python"], check=True)
        target = pathlib.Path(self.get_ext_fullpath("snug._snug")).resolve().parent.parent
        subprocess.run(["cmake", "--install", folder, "--component", "python", "--prefix", target], check=True)
        library = target / "snug" / "libsnug.so.0"  # a link, which a wheel would have as a second copy
        library.resolve().replace(library)

    def configure(self, folder):
        if absent := missing():
            sys.exit(f"snug: missing on this machine: {', '.join(absent)}")
        done = subprocess.run(["cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}",
                               f"-DTorch_DIR={torch.utils.cmake_prefix_path}/Torch", "-DSNUG_BUILD_CLI=OFF", "-DSNUG_BUILD_C=OFF",
                               "-DSNUG_BUILD_PYTHON=REQUIRED", "-DSNUG_BUILD_TESTS=OFF", "-DSNUG_BUILD_EXAMPLES=OFF"])
        if done.returncode != 0:
            sys.exit("snug: CMake could not prepare the build: the first CMake Error above says why. If GitHub cannot be reached, install the "
                     "libraries that the build fetches (Debian: apt-get install libhwy-dev nlohmann-json3-dev zlib1g-dev)")


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
