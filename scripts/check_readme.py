#!/usr/bin/env python3
"""Checks that README.md shows examples/quickstart.cpp as it is, and that the files it links to exist.

usage: check_readme.py ROOT
"""

import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1])
readme = (root / "README.md").read_text()
problems = []
shown = re.search(r"```cpp\n(.*?)```", readme, re.DOTALL)[1].strip()
if shown != (root / "examples" / "quickstart.cpp").read_text().strip():
    problems.append("README.md: its code is not examples/quickstart.cpp")
for target in re.findall(r"\]\(([^)#:]+)\)", readme):
    if not (root / target).exists():
        problems.append(f"README.md: links to {target}, which is not there")
if len(readme.splitlines()) > 200:
    problems.append(f"README.md: {len(readme.splitlines())} lines, more than 200")
print("\n".join(problems) if problems else "README.md is in order")
sys.exit(1 if problems else 0)
