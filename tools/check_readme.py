#!/usr/bin/env python3
"""Checks README.md, the pages of docs/ and the diffs of examples/adopted.

- README.md has fewer than 100 lines and 700 words. Its first ```python block is part of examples/python/quickstart.py, and its first
  ```cpp block is part of examples/quickstart.cpp; the tests run both programs.
- Each ```cpp block of a page is part of a source that the page links to.
- Links lead to files of the repository.
- The diffs of examples/adopted are whole, name a commit, and change as many lines as examples/adopted/README.md says, at most ten.

usage: check_readme.py ROOT
"""

import pathlib
import re
import sys
import textwrap

LINES, WORDS = 100, 700
BLOCK = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")

root = pathlib.Path(sys.argv[1])
readme = (root / "README.md").read_text()
problems = []


def is_part(code, source):
    """Whether the lines of `code` stand in `source` one after the other, as they are or further to the right."""
    return any(f"\n{textwrap.indent(code, ' ' * indent)}" in f"\n{source}" for indent in range(0, 9, 2))


def links_of(document, text):
    """The files that `text` links to. Adds to `problems` each that is missing."""
    found = [document.parent / link for link in LINK.findall(BLOCK.sub("", text))]
    problems.extend(f"{document.relative_to(root)}: links to {file.relative_to(document.parent)}, which is not there" for file in found if not file.exists())
    return found


for language, example in (("python", "examples/python/quickstart.py"), ("cpp", "examples/quickstart.cpp")):
    shown = next((code for name, code in BLOCK.findall(readme) if name == language), None)
    if shown is None or not is_part(shown, (root / example).read_text()):
        problems.append(f"README.md: its first {language} block is not part of {example}")
links_of(root / "README.md", readme)
for number, of, limit in ((len(readme.splitlines()), "lines", LINES), (len(re.sub(r"<!--.*?-->", "", readme).split()), "words", WORDS)):
    if number >= limit:
        problems.append(f"README.md: {number} {of}; there must be fewer than {limit}")

for page in sorted((root / "docs").glob("*.md")):
    text = page.read_text()
    sources = [file.read_text() for file in links_of(page, text) if file.suffix == ".cpp" and file.exists()]
    for language, code in BLOCK.findall(text):
        if language == "cpp" and not any(is_part(code, source) for source in sources):
            problems.append(f"docs/{page.name}: this code is in no source that the page links to: {code.splitlines()[0]}")


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
print("\n".join(problems) if problems else "README.md and the pages are in order")
sys.exit(1 if problems else 0)
