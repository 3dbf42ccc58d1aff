#!/usr/bin/env python3
"""The loops that people have, as examples with and without snug: prints the table of docs/budget.md, or checks its column of lines.

An example has the plain loop between the lines `// loop: plain` and `// loop: snug`, and snug's between that and `// loop: end`. Its last
line of output has both peaks. It ends with 0 only if both loops have the same bits and the peak is within 60 % of the plain one.

usage: loops.py ROOT PROGRAMS    runs the examples in the folder PROGRAMS, and prints the table
       loops.py ROOT --check     runs nothing; a line for each row of the page whose lines are others, and exit status 1
"""

import difflib
import pathlib
import re
import subprocess
import sys

LOOPS = {"gan": "GAN, two optimizers", "segmentation": "segmentation, encoder frozen for an epoch, new optimizer each epoch",
         "ppo": "PPO, early stop by KL", "points": "points that are split and pruned, an Adam for each tensor"}
PAGE = "docs/budget.md"
BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def changed(source):
    """Lines of the plain loop that snug's loop has not, and lines that it has instead."""
    plain, with_snug = re.search(r"// loop: plain\n(.*?)// loop: snug\n(.*?)// loop: end\n", source, re.DOTALL).groups()
    marks = [line[0] for line in difflib.ndiff(plain.strip().splitlines(), with_snug.strip().splitlines())]
    return f"{marks.count('-')} became {marks.count('+')}"


def row(root, name, printed=None):
    lines = changed((root / "examples" / f"{name}.cpp").read_text())
    begin = f"| {LOOPS[name]} | `{name}.cpp` | {lines} |"
    if printed is None:
        return begin
    (plain, unit), (peak, peak_unit) = re.findall(r"peak ([\d.]+) (\w+)", printed)
    share = 100 * float(peak) * BYTES[peak_unit] / (float(plain) * BYTES[unit])
    bits = re.search(r"(the same|other) bits", printed)[1]
    return f"{begin} {plain} {unit} | {peak} {peak_unit} | {share:.0f} % | {bits} |"


def main():
    root = pathlib.Path(sys.argv[1])
    if sys.argv[2] == "--check":
        page = (root / PAGE).read_text().splitlines()
        wrong = [begin for begin in (row(root, name) for name in LOOPS) if not any(line.startswith(begin) for line in page)]
        for begin in wrong:
            print(f"{PAGE} has no row {begin}; run {sys.argv[0]} ROOT PROGRAMS, and quote what it prints")
        return 1 if wrong else 0
    print("| loop | example | lines | plain peak | peak | share | bits |\n|---|---|---|---|---|---|---|")
    failed = False
    for name in LOOPS:
        run = subprocess.run([pathlib.Path(sys.argv[2]) / name], capture_output=True, text=True)
        if " bits" not in run.stdout:
            sys.exit(f"{name} failed: {run.stderr}")
        print(row(root, name, run.stdout), flush=True)
        failed = failed or run.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
