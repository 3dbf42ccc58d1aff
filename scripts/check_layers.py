#!/usr/bin/env python3
"""Checks that the code keeps the order that ARCHITECTURE.md draws.

usage: check_layers.py [ROOT]        exit status 1 and a line for each breach
       check_layers.py --self-test   shows that each rule can fail

Rules:
  1. An #include goes from a module to one that the ```layers block of ARCHITECTURE.md allows, directly or through others.
  2. Sources named torch-free in the ```torch-free block include nothing of torch, not even through snug's own headers.
  3. Public headers do not include torch's umbrella headers, which cost twenty seconds a file.
  4. detail/ headers are included by the library and its tests only.
  5. No C++ file is longer than 500 lines.
"""

import pathlib
import re
import sys
import tempfile

INCLUDE = re.compile(r'^\s*#\s*include\s+["<]([^">]+)[">]', re.MULTILINE)
TORCH = re.compile(r"^(ATen|torch|c10|caffe2)/")
UMBRELLA = re.compile(r"^(torch/torch\.h|torch/all\.h|torch/nn\.h|torch/optim\.h|ATen/ATen\.h)$")
MAX_LINES = 500


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
        self.allowed = allowed_modules(block(text, "layers"))
        self.torch_free = block(text, "torch-free")
        self.files = sorted(p for folder in ("snug", "cli", "tests", "examples", "benchmarks")
                            for suffix in ("*.h", "*.cpp") for p in (root / folder).rglob(suffix))
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
        for path in self.files:
            name = self.name(path)
            lines = path.read_text().count("\n")
            if lines > MAX_LINES:
                yield f"{name}: {lines} lines, more than {MAX_LINES}"
            if self.is_torch_free(name):
                chain = self.reaches_torch(name, set())
                if chain:
                    yield f"{name}: is torch-free, but includes {' -> '.join(chain[1:])}"
            top = name.split("/")[0]
            module = "cli" if top == "cli" else name.split("/")[1] if top == "snug" else None
            is_public = name.startswith("snug/") and name.endswith(".h") and "/detail/" not in name
            for include in self.includes[name]:
                if is_public and name != "snug/snug.h" and UMBRELLA.match(include):
                    yield f"{name}: a public header includes {include}"
                if "/detail/" in include and top in ("cli", "examples"):
                    yield f"{name}: includes {include}, which is internal to the library"
                parts = include.split("/")
                if parts[0] != "snug" or len(parts) < 3 or module is None or name == "snug/snug.h":
                    continue
                if module not in self.allowed:
                    yield f"{name}: module '{module}' is not in the layers of ARCHITECTURE.md"
                elif parts[1] not in self.allowed[module]:
                    yield f"{name}: {module} must not include {parts[1]} ({include})"


def self_test():
    layers = "```layers\ncore:\nmemory: core\ncli: memory\n```\n```torch-free\ncore/plain\n```\n"
    cases = {
        "must not include": {"snug/core/a.h": '#include "snug/memory/b.h"\n'},
        "is torch-free": {"snug/core/plain.h": '#include "snug/core/t.h"\n', "snug/core/t.h": "#include <ATen/core/Tensor.h>\n"},
        "a public header includes": {"snug/memory/a.h": "#include <torch/torch.h>\n"},
        "internal to the library": {"cli/a.cpp": '#include "snug/memory/detail/a.h"\n'},
        "lines, more than": {"snug/core/a.cpp": "\n" * (MAX_LINES + 1)},
        "not in the layers": {"snug/new/a.h": '#include "snug/core/b.h"\n'},
    }
    for expected, files in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "ARCHITECTURE.md").write_text(layers)
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            found = list(Tree(root).breaches())
            assert len(found) == 1 and expected in found[0], (expected, found)
    print(f"all {len(cases)} rules can fail")


if __name__ == "__main__":
    if sys.argv[1:] == ["--self-test"]:
        self_test()
    else:
        problems = list(Tree(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()).breaches())
        print("\n".join(problems) if problems else "layers are in order")
        sys.exit(1 if problems else 0)
