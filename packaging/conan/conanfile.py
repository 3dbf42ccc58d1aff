"""A recipe for this source tree: conan create packaging/conan -s compiler.cppstd=20

LibTorch is no Conan package: Torch_DIR names the one to build with, as for every other way to build snug.
"""

import os
import pathlib

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import copy


class Snug(ConanFile):
    name = "snug"
    version = "0.1.0"
    description = "Training of models and batches that do not fit in memory, on LibTorch"
    license = "Apache-2.0"
    settings = "os", "compiler", "build_type", "arch"
    options = {"program": [True, False]}
    default_options = {"program": True}

    def export_sources(self):
        root = pathlib.Path(self.recipe_folder).parents[1]
        copy(self, "LICENSE", root, self.export_sources_folder)
        copy(self, "CMakeLists.txt", root, self.export_sources_folder)
        for folder in ("include", "src", "program", "cmake"):
            copy(self, "*", root / folder, os.path.join(self.export_sources_folder, folder))

    def validate(self):
        if self.settings.os != "Linux" or self.settings.arch != "x86_64":
            raise ConanInvalidConfiguration("snug runs on Linux on x86-64 only")
        check_min_cppstd(self, 20)
        if "Torch_DIR" not in os.environ:
            raise ConanInvalidConfiguration("set Torch_DIR to the share/cmake/Torch of a LibTorch from 2.11 on")

    def requirements(self):
        self.requires("highway/1.0.3")
        self.requires("nlohmann_json/3.11.2")
        self.requires("zlib/[>=1.2 <2]")
        if self.options.program:
            self.requires("cli11/2.1.2")

    def layout(self):
        cmake_layout(self)

    def generate(self):
        dependencies = CMakeDeps(self)
        dependencies.set_property("highway", "cmake_file_name", "hwy")  # as the library's own configuration has it
        dependencies.set_property("highway::hwy", "cmake_target_name", "hwy::hwy")
        dependencies.generate()
        toolchain = CMakeToolchain(self)
        for part in ("TESTS", "EXAMPLES", "PYTHON", "C"):
            toolchain.cache_variables[f"SNUG_BUILD_{part}"] = False
        toolchain.cache_variables["SNUG_BUILD_CLI"] = bool(self.options.program)
        toolchain.cache_variables["Torch_DIR"] = os.environ["Torch_DIR"]
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_info(self):
        # snug's own configuration finds LibTorch; Conan's would not.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs.append("lib/cmake/snug")
