#!/usr/bin/env python3
"""Checks that the code keeps the order that ARCHITECTURE.md draws.

usage: check_layers.py [ROOT]        exit status 1 and a line for each breach
       check_layers.py --self-test   shows that each rule can fail

Rules:
  1. An #include goes from a module to a module that the ```layers block of ARCHITECTURE.md allows, directly or through others. The
     ```public block says to which module each header of include/snug/ belongs.
  2. Sources named torch-free in the ```torch-free block include nothing of torch, not even through snug's own headers.
  3. Public headers, those of include/snug/, include of torch at most ATen/core/Tensor.h and the small headers of c10/core; in the
     modules exported, optim, distributed and step also headers of torch/nn/ or torch/optim/. Only snug.h includes an umbrella header.
  4. Headers of src/ are included by what is built with the library: the library, the program, the tests, the benchmarks and the Python
     package. Public headers include only public headers.
  5. The library includes nothing of the program, the tests or the like, and not the umbrella snug.h.
  6. CUDA sources (.cu, .cuh) include nothing of torch, so that nvcc compiles them alone.
  7. Every module has a line in the ```layers block, and every public header a module in the ```public block.
  8. Files of the project are included by their path from the root, or from include/.
  9. Nine of ten C++ and CUDA files of the library and the program have at most 250 lines: a file may be long where its thought is.
  10. Each file that ARCHITECTURE.md names by a path of src/, program/ or include/snug/ exists.
"""

import pathlib
import re
import sys
import tempfile

INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]', re.MULTILINE)
RELATIVE = re.compile(r'^\s*#\s*include\s+"(\.[^"]*|[^/"]+)"', re.MULTILINE)
TORCH = re.compile(r"^(ATen|torch|c10|caffe2)/")
PUBLIC = re.compile(r"^(ATen/core/Tensor\.h|c10/core/\w+\.h)$")
BUILT_ON = re.compile(r"^torch/(nn|optim)/.+\.h$")
MAY_BUILD_ON_TORCH = ("exported", "optim", "distributed", "step")
NAMED = re.compile(r"`((?:[a-z_]+/)+\w+\.(?:cpp|h))`")
FOLDERS = ("include/snug", "src", "program", "tests", "examples", "benchmarks", "bindings", "python")
BUILT_WITH_THE_LIBRARY = ("src", "program", "tests", "benchmarks", "python")
SUFFIXES = ("*.h", "*.cpp", "*.cu", "*.cuh")
MAX_LINES = 250


def block(text, name):
    found = re.search(rf"^```{name}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if not found:
        sys.exit(f"check_layers: ARCHITECTURE.md has no ```{name} block")
    return [line.split("#")[0].strip() for line in found[1].splitlines() if line.split("#")[0].strip()]


def table(lines):
    return {key.strip(): set(values.replace(",", " ").split()) for key, _, values in (line.partition(":") for line in lines)}


def allowed_modules(direct):
    closed = {}

    def close(module, path=()):
        if module in path:
            sys.exit(f"check_layers: the layers have a cycle: {' -> '.join(path + (module,))}")
        if module not in closed:
            below = direct.get(module, set())
            closed[module] = below.union(*(close(m, path + (module,)) for m in below)) | {module}
        return closed[module]

    for module in direct:
        close(module)
    return closed


class Tree:
    def __init__(self, root):
        self.root = root
        text = (root / "ARCHITECTURE.md").read_text()
        self.named = NAMED.findall(text)
        self.allowed = allowed_modules(table(block(text, "layers")))
        self.module_of_header = {f"snug/{header}.h": module for module, headers in table(block(text, "public")).items() for header in headers}
        self.torch_free = block(text, "torch-free")
        self.files = sorted(p for folder in FOLDERS for suffix in SUFFIXES for p in (root / folder).rglob(suffix))
        self.includes = {self.name(p): INCLUDE.findall(p.read_text()) for p in self.files}

    def name(self, path):
        """The file as an #include names it."""
        return path.relative_to(self.root).as_posix().removeprefix("include/")

    def module(self, name):
        """None: the file belongs to no module, as tests do."""
        top, *below = name.split("/")
        if top == "snug":
            return self.module_of_header.get(name)
        if top == "program":
            return below[0] if below[0] in self.allowed else "program"
        return below[0] if top == "src" else None

    def is_torch_free(self, name):
        return any(re.fullmatch(rf"(src|program|snug)/{pattern}\.(h|cpp)", name) for pattern in self.torch_free)

    def reaches_torch(self, name, seen):
        for include in self.includes.get(name, []):
            if TORCH.match(include):
                return [name, include]
            if include in self.includes and include not in seen:
                seen.add(include)
                chain = self.reaches_torch(include, seen)
                if chain:
                    return [name] + chain
        return None

    def breaches(self):
        for path in self.named:
            if not any((self.root / folder / path).is_file() for folder in ("src", "include", "program", ".")):
                yield f"ARCHITECTURE.md: names {path}, which does not exist"
        lengths = sorted(p.read_text().count("\n") for p in self.files if self.name(p).startswith(("snug/", "src/", "program/")))
        if lengths and lengths[len(lengths) * 9 // 10] > MAX_LINES:
            yield f"one of ten files has {lengths[len(lengths) * 9 // 10]} lines or more; at most {MAX_LINES}"
        for path in self.files:
            name = self.name(path)
            for include in RELATIVE.findall(path.read_text()):
                yield f"{name}: includes {include}; write its path from the root"
            kind = "torch-free" if self.is_torch_free(name) else "CUDA" if path.suffix in (".cu", ".cuh") else None
            chain = self.reaches_torch(name, set()) if kind else None
            if chain:
                yield f"{name}: is {kind}, but includes {' -> '.join(chain[1:])}"
            module = self.module(name)
            if module not in self.allowed and (module or name.startswith("snug/")) and name != "snug/snug.h":
                yield f"{name}: module '{module}' is not in the layers of ARCHITECTURE.md"
                module = None
            for include in self.includes[name]:
                yield from self.breaches_of(name, module, include)

    def breaches_of(self, name, module, include):
        top, other = name.split("/")[0], self.module(include)
        if top in ("src", "snug") and name != "snug/snug.h" and (include.split("/")[0] in FOLDERS[2:] or include == "snug/snug.h"):
            yield f"{name}: the library includes {include}, which is above it"
        elif include.startswith("src/") and top == "snug":
            yield f"{name}: a public header includes {include}, which is not installed"
        elif include.startswith("src/") and top not in BUILT_WITH_THE_LIBRARY:
            yield f"{name}: includes {include}, which is internal to the library"
        elif module and other and other not in self.allowed[module]:
            yield f"{name}: {module} must not include {other} ({include})"
        if top == "snug" and name != "snug/snug.h" and TORCH.match(include) and not PUBLIC.match(include):
            if not (module in MAY_BUILD_ON_TORCH and BUILT_ON.match(include)):
                yield f"{name}: a public header includes {include}"


def self_test():
    blocks = ("```layers\nchart:\ncore:\nmemory: core\noptim: core\nprogram: chart, memory\n```\n"
              "```public\ncore: core\nmemory: memory\noptim: sgd\n```\n```torch-free\ncore/plain\n```\n")
    tensor = "#include <ATen/core/Tensor.h>\n"
    cases = [
        ("must not include", {"src/core/a.h": '#include "src/memory/b.h"\n'}),
        ("must not include", {"src/core/a.h": '#include "snug/memory.h"\n'}),
        ("must not include", {"include/snug/core.h": '#include "snug/memory.h"\n'}),
        ("must not include", {"src/core/a.cu": '#include "src/memory/b.h"\n'}),
        ("must not include", {"program/chart/a.h": '#include "src/memory/b.h"\n'}),
        ("is torch-free", {"src/core/plain.h": '#include "src/core/t.h"\n', "src/core/t.h": tensor}),
        ("is torch-free", {"src/core/plain.h": '#include "snug/core.h"\n', "include/snug/core.h": tensor}),
        ("is CUDA", {"src/core/a.cu": '#include "src/core/t.h"\n', "src/core/t.h": tensor}),
        ("a public header includes", {"include/snug/memory.h": "#include <torch/torch.h>\n"}),
        ("a public header includes", {"include/snug/sgd.h": "#include <torch/optim.h>\n"}),
        ("a public header includes", {"include/snug/memory.h": "#include <torch/nn/pimpl.h>\n"}),
        ("a public header includes", {"include/snug/memory.h": "#include <ATen/ops/add.h>\n"}),
        ("which is not installed", {"include/snug/memory.h": '#include "src/memory/a.h"\n'}),
        ("internal to the library", {"bindings/c/a.cpp": '#include "src/memory/a.h"\n'}),
        ("internal to the library", {"examples/a.cpp": '#include "src/memory/a.h"\n'}),
        ("which is above it", {"src/core/a.cpp": '#include "program/a.h"\n'}),
        ("which is above it", {"include/snug/core.h": '#include "program/chart/a.h"\n'}),
        ("which is above it", {"src/core/a.cpp": '#include "snug/snug.h"\n'}),
        ("one of ten files", {"src/core/a.cpp": "\n" * (MAX_LINES + 1)}),
        ("write its path from the root", {"src/core/a.cpp": '#include "../memory/a.h"\n'}),
        ("write its path from the root", {"src/core/a.h": '#include "a.h"\n'}),
        ("not in the layers", {"src/new/a.h": "#include <vector>\n"}),
        ("not in the layers", {"include/snug/new.h": "#include <vector>\n"}),
        ("which does not exist", {"ARCHITECTURE.md": blocks + "See `core/gone.cpp`.\n"}),
        (None, {"include/snug/sgd.h": "#include <torch/optim/adam.h>\n" + tensor, "include/snug/core.h": "#include <c10/core/Device.h>\n",
                "include/snug/snug.h": '#include <torch/torch.h>\n#include "snug/core.h"\n', "src/core/a.h": "#include <torch/torch.h>\n",
                "program/chart/a.h": '#include "program/chart/b.h"\n', "program/a.cpp": '#include "program/chart/a.h"\n#include "src/memory/a.h"\n',
                "src/memory/a.cpp": '#include "src/core/a.h"\n#include "snug/core.h"\n',
                "benchmarks/a.cpp": '#include "src/memory/a.h"\n', "python/src/a.cpp": '#include "src/memory/a.h"\n',
                "tests/a.cpp": '#include "src/memory/a.h"\n#include "snug/snug.h"\n'}),
    ]
    for expected, files in cases:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "ARCHITECTURE.md").write_text(blocks)
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            found = list(Tree(root).breaches())
            matches = len(found) == 1 and expected in found[0] if expected else not found
            assert matches, (expected, files, found)
    print(f"every rule can fail, in {len(cases)} cases")


if __name__ == "__main__":
    if sys.argv[1:] == ["--self-test"]:
        self_test()
    else:
        problems = list(Tree(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()).breaches())
        print("\n".join(problems) if problems else "layers are in order")
        sys.exit(1 if problems else 0)
