"""libsnug_c shows the functions of snug/c.h and nothing else. Usage: exports_test.py LIBRARY"""

import pathlib
import re
import subprocess
import sys

header = pathlib.Path(__file__).parents[2] / "bindings/c/snug/c.h"
declared = set(re.findall(r"^SNUG_C_API .*?\b(snug_\w+)\(", header.read_text(), re.M))
listed = subprocess.run(["nm", "-D", "--defined-only", sys.argv[1]], check=True, capture_output=True, text=True).stdout
shown = {line.split()[-1] for line in listed.splitlines()}
assert declared and shown == declared, f"declared alone: {declared - shown}; shown alone: {shown - declared}"
