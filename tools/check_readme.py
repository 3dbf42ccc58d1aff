#!/usr/bin/env python3
"""Checks that README.md shows examples/quickstart.cpp as it is, that pages in docs/ which name
an example show its code (```python blocks are others'), and that the files they link to exist.
The diffs of examples/adopted are whole, name a commit, and change as many lines as is said there, at most ten.

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


def changed(diff):
    """(lines that are new, lines that are old); None if a hunk's header does not count its lines."""
    new = old = 0
    for old_size, new_size, body in re.findall(r"^@@ -\d+,(\d+) \+\d+,(\d+) @@.*\n((?:[-+ ].*\n|\n)*)", diff, re.MULTILINE):
        kinds = [line[:1] for line in body.split("\n")[:-1]]
        if (len(kinds) - kinds.count("+"), len(kinds) - kinds.count("-")) != (int(old_size), int(new_size)):
            return None
        new, old = new + kinds.count("+"), old + kinds.count("-")
    return new, old


adopted = root / "examples" / "adopted"
for file in sorted(adopted.glob("*.diff")):
    diff = file.read_text()
    count = changed(diff)
    if not count or not 0 < max(count) <= 10:
        problems.append(f"{file.name}: a hunk is not whole, or more than ten lines are changed: {count}")
    elif not re.search(rf"\({file.name}\).*\| {count[0]} new for {count[1]} old \|", (adopted / "README.md").read_text()):
        problems.append(f"examples/adopted/README.md: {file.name} has {count[0]} new lines for {count[1]} old ones")
    if not re.search(r"\b[0-9a-f]{40}\b", diff.split("diff --git")[0]):
        problems.append(f"{file.name}: its first lines name no commit")
if len(readme.splitlines()) > 200:
    problems.append(f"README.md: {len(readme.splitlines())} lines, more than 200")
print("\n".join(problems) if problems else "README.md is in order")
sys.exit(1 if problems else 0)
