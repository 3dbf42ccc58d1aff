#!/usr/bin/env python3
"""Checks that README.md shows examples/quickstart.cpp as it is, that pages in docs/ which name
an example show its code (```python blocks are others'), and that the files they link to exist.

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
for page in sorted((root / "docs").glob("*.md")):
    blocks = r"```\w*\n(.*?)```"
    text = re.sub(blocks, "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    problems += [f"docs/{page.name}: links to {link}, which is not there" for link in links if not (page.parent / link).exists()]
    example = next((page.parent / link for link in links if link.endswith(".cpp")), None)
    for language, code in re.findall(r"```(\w*)\n(.*?)```", page.read_text(), re.DOTALL) if example else []:
        if language != "python" and code not in example.read_text():
            problems.append(f"docs/{page.name}: this code is not in {example.name}: {code.splitlines()[0]}")
if len(readme.splitlines()) > 200:
    problems.append(f"README.md: {len(readme.splitlines())} lines, more than 200")
print("\n".join(problems) if problems else "README.md is in order")
sys.exit(1 if problems else 0)
