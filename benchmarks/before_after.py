"""Lets the benchmarks of two builds take turns and prints ratios of CPU time: has a change made anything slower?

Three processes take turns for each case of run.py's claims that is snug's own: the build before, the build now, and the build now once
more. "now / now" tells how far a program differs from itself; a difference within its range says nothing. CPU time is that of all
threads of a process. OMP_NUM_THREADS is 1.

usage: before_after.py BUILD_BEFORE BUILD_NOW [--turns N] [--only REGEX]
"""

import argparse
import os
import re
import statistics
import sys

import run


def own_cases():
    """(program, case, calls) of all claims, each once, without the peers."""
    cases = {}
    for _, a, b, calls, _ in run.CLAIMS:
        for side in filter(None, (a, b)):
            if not side[0].startswith(("python:", "peers/")):
                cases.setdefault(side, min(calls, 1000))
    return [(program, case, calls) for (program, case), calls in cases.items()]


def measure(builds, program, case, calls, turns):
    processes = [run.Program(build, program, "cpu") for build in builds]
    try:
        for process in processes:
            process.run(case, 1)
        seconds = [[] for _ in builds]
        for turn in range(turns):
            order = [(turn + i) % len(builds) for i in range(len(builds))]
            for i in order if turn % 2 == 0 else reversed(order):
                seconds[i].append(processes[i].run(case, calls)[1] / calls)
        return seconds
    finally:
        for process in processes:
            process.stop()


def ratio(above, below):
    ratios = [a / b for a, b in zip(above, below)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("now")
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument("--only", default="", help="cases whose 'program case' this regular expression finds")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print("| case | before, ms | now, ms | now / before | now / now |\n|---|---|---|---|---|", flush=True)
    for program, case, calls in own_cases():
        if not re.search(arguments.only, f"{program} {case}"):
            continue
        before, now, again = measure([arguments.before, arguments.now, arguments.now], program, case, calls, arguments.turns)
        medians = [f"{statistics.median(seconds) * 1e3:.4g}" for seconds in (before, now)]
        print(f"| `{program} {case}` | {medians[0]} | {medians[1]} | {ratio(now, before)} | {ratio(now, again)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
