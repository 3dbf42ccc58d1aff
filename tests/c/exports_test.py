"""libsnug_c shows the functions of snug/c.h and nothing else, and libsnug takes no allocation of the process over.

usage: exports_test.py LIBSNUG_C LIBSNUG
"""

import pathlib
import re
import subprocess
import sys


def shown_by(library):
    listed = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in listed.splitlines()}


header = pathlib.Path(__file__).parents[2] / "bindings/c/snug/c.h"
declared = set(re.findall(r"^SNUG_C_API .*?\b(snug_\w+)\(", header.read_text(), re.M))
shown = shown_by(sys.argv[1])
assert declared and shown == declared, f"declared alone: {declared - shown}; shown alone: {shown - declared}"

of_snug = shown_by(sys.argv[2])
allocating = {name for name in of_snug if re.match(r"(malloc|free|calloc|realloc|mmap|_Zn[wa]|_Zd[la])", name)}
assert of_snug and not allocating, allocating
