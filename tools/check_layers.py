#!/usr/bin/env python3
"""Checks that the code keeps the order that ARCHITECTURE.md draws.

usage: check_layers.py [ROOT]        exit status 1 and a line for each breach
       check_layers.py --self-test   shows that each rule can fail

Rules:
  1. An #include goes from a module to one that the ```layers block of ARCHITECTURE.md allows, directly or through others.
  2. Sources named torch-free in the ```torch-free block include nothing of torch, not even through snug's own headers.
  3. Public headers, those of snug/ outside detail/, include of torch at most ATen/core/Tensor.h and the small headers of c10/core;
     in exported, models, optim, distributed, step and run also those of torch/nn/ or torch/optim/. Only snug.h includes an umbrella header.
  4. detail/ headers are included by the library and its tests only. Public headers include neither these nor chart's:
     they are not installed.
  5. The library includes nothing of the program, the tests or the like, and not the umbrella snug.h.
  6. CUDA sources (.cu, .cuh) include nothing of torch, so that nvcc compiles them alone.
  7. Every module of snug/ has a line in the ```layers block.
  8. Our own files are included by their path from the root, or rules 1 to 6 would not see where they lie.
  9. Nine of ten C++ and CUDA files of snug/ have at most 250 lines: a file may be long where its thought is.
  10. Each file that ARCHITECTURE.md names by a path of snug/ is there.
"""

import pathlib
import re
import sys
import tempfile

INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]', re.MULTILINE)
RELATIVE = re.compile(r'^\s*#\s*include\s+"(\.[^"]*|detail/[^"]*|[^/"]+)"', re.MULTILINE)
TORCH = re.compile(r"^(ATen|torch|c10|caffe2)/")
PUBLIC = re.compile(r"^(ATen/core/Tensor\.h|c10/core/\w+\.h)$")
BUILT_ON = re.compile(r"^torch/(nn|optim)/.+\.h$")
NOT_INSTALLED = ("chart",)
MAY_BUILD_ON_TORCH = ("exported", "models", "optim", "distributed", "step", "run")
NAMED = re.compile(r"`([a-z]+/[\w/]+\.(?:cpp|h))`")
SUFFIXES = ("*.h", "*.cpp", "*.cu", "*.cuh")
MAX_LINES = 250


def block(text, name):
    found = re.search(rf"^```{name}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    if not found:
        sys.exit(f"check_layers: ARCHITECTURE.md has no ```{name} block")
    return [line.split("#")[0].strip() for line in found[1].splitlines() if line.split("#")[0].strip()]


def allowed_modules(lines):
    direct = {}
    for line in lines:
        module, _, below = line.partition(":")
        direct[module.strip()] = set(below.replace(",", " ").split())
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
        self.allowed = allowed_modules(block(text, "layers"))
        self.torch_free = block(text, "torch-free")
        self.files = sorted(p for folder in ("snug", "cli", "tests", "examples", "benchmarks", "bindings", "python")
                            for suffix in SUFFIXES for p in (root / folder).rglob(suffix))
        self.includes = {self.name(p): INCLUDE.findall(p.read_text()) for p in self.files}

    def name(self, path):
        return path.relative_to(self.root).as_posix()

    def is_torch_free(self, name):
        return any(re.fullmatch(rf"snug/{pattern}\.(h|cpp)", name) for pattern in self.torch_free)

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
            if not (self.root / "snug" / path).is_file():
                yield f"ARCHITECTURE.md: names {path}, which is not in snug/"
        lengths = sorted(p.read_text().count("\n") for p in self.files if self.name(p).startswith("snug/"))
        if lengths and lengths[len(lengths) * 9 // 10] > MAX_LINES:
            yield f"snug/: one of ten files has {lengths[len(lengths) * 9 // 10]} lines or more; at most {MAX_LINES}"
        for path in self.files:
            name = self.name(path)
            text = path.read_text()
            for include in RELATIVE.findall(text):
                yield f"{name}: includes {include}; write its path from the root"
            kind = "torch-free" if self.is_torch_free(name) else "CUDA" if path.suffix in (".cu", ".cuh") else None
            chain = self.reaches_torch(name, set()) if kind else None
            if chain:
                yield f"{name}: is {kind}, but includes {' -> '.join(chain[1:])}"
            top, *below = name.split("/")
            module = "cli" if top == "cli" else below[0] if top == "snug" and len(below) > 1 else None
            if module and module not in self.allowed:
                yield f"{name}: module '{module}' is not in the layers of ARCHITECTURE.md"
                module = None
            for include in self.includes[name]:
                if top == "snug" and module:
                    yield from self.breaches_of_the_library(name, module, include)
                if "/detail/" in include and top not in ("snug", "tests"):
                    yield f"{name}: includes {include}, which is internal to the library"
                parts = include.split("/")
                if module and parts[0] == "snug" and len(parts) > 2 and parts[1] not in self.allowed[module]:
                    yield f"{name}: {module} must not include {parts[1]} ({include})"

    def breaches_of_the_library(self, name, module, include):
        if include.split("/")[0] in ("cli", "tests", "examples", "benchmarks", "bindings", "python") or include == "snug/snug.h":
            yield f"{name}: the library includes {include}, which is above it"
        if not name.endswith((".h", ".cuh")) or "/detail/" in name or module in NOT_INSTALLED:
            return
        built_on = module in MAY_BUILD_ON_TORCH and BUILT_ON.match(include)
        if TORCH.match(include) and not PUBLIC.match(include) and not built_on:
            yield f"{name}: a public header includes {include}"
        if "/detail/" in include or include.startswith(tuple(f"snug/{module}/" for module in NOT_INSTALLED)):
            yield f"{name}: a public header includes {include}, which is not installed"


def self_test():
    layers = "```layers\nchart:\ncore:\nmemory: chart, core\noptim: core\ncli: memory\n```\n```torch-free\ncore/plain\n```\n"
    tensor = "#include <ATen/core/Tensor.h>\n"
    cases = [
        ("must not include", {"snug/core/a.h": '#include "snug/memory/b.h"\n'}),
        ("must not include", {"snug/core/a.cu": '#include "snug/memory/b.h"\n'}),
        ("is torch-free", {"snug/core/plain.h": '#include "snug/core/t.h"\n', "snug/core/t.h": tensor}),
        ("is CUDA", {"snug/core/a.cu": '#include "snug/core/t.h"\n', "snug/core/t.h": tensor}),
        ("a public header includes", {"snug/memory/a.h": "#include <torch/torch.h>\n"}),
        ("a public header includes", {"snug/optim/a.h": "#include <torch/optim.h>\n"}),
        ("a public header includes", {"snug/memory/a.h": "#include <torch/nn/pimpl.h>\n"}),
        ("a public header includes", {"snug/memory/a.h": "#include <ATen/ops/add.h>\n"}),
        ("which is not installed", {"snug/memory/a.h": '#include "snug/memory/detail/a.h"\n'}),
        ("which is not installed", {"snug/memory/a.h": '#include "snug/chart/a.h"\n'}),
        ("internal to the library", {"cli/a.cpp": '#include "snug/memory/detail/a.h"\n'}),
        ("internal to the library", {"bindings/c/a.cpp": '#include "snug/memory/detail/a.h"\n'}),
        ("internal to the library", {"benchmarks/a.cpp": '#include "snug/memory/detail/a.h"\n'}),
        ("which is above it", {"snug/core/a.cpp": '#include "cli/a.h"\n'}),
        ("which is above it", {"snug/core/a.cpp": '#include "snug/snug.h"\n'}),
        ("one of ten files", {"snug/core/a.cpp": "\n" * (MAX_LINES + 1)}),
        ("write its path from the root", {"snug/core/a.cpp": '#include "../memory/a.h"\n'}),
        ("write its path from the root", {"snug/core/a.h": '#include "detail/a.h"\n'}),
        ("not in the layers", {"snug/new/a.h": "#include <vector>\n"}),
        ("which is not in snug/", {"ARCHITECTURE.md": layers + "See `core/gone.cpp`.\n"}),
        (None, {"snug/optim/a.h": "#include <torch/optim/adam.h>\n" + tensor, "snug/core/a.h": "#include <c10/core/Device.h>\n",
                "snug/snug.h": "#include <torch/torch.h>\n", "snug/core/detail/a.h": "#include <torch/torch.h>\n",
                "snug/chart/a.h": '#include "snug/chart/b.h"\n', "snug/memory/a.cpp": '#include "snug/chart/a.h"\n',
                "tests/a.cpp": '#include "snug/memory/detail/a.h"\n#include "snug/snug.h"\n'}),
    ]
    for expected, files in cases:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "ARCHITECTURE.md").write_text(layers)
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
