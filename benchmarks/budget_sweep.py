"""Runs benchmarks/budget_sweep.cpp and its Python peer, and writes the numbers as CSV and a figure of each model
as SVG; prints them as Markdown.

usage: budget_sweep.py BUILD_DIR [--pairs N] [--out FOLDER] [--from CSV]
"""

import argparse
import csv
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent
FIELDS = ["model", "language", "method", "setting", "peak_bytes", "time", "lowest", "highest"]
TITLES = {"gpt": "GPT, 12 blocks, 4 x 256 tokens, d = 256", "resnet": "ResNet-20, 32 pictures of 32 x 32"}
# Measured by script/gpu-trial, and drawn by --from.
TITLES_ON_GPU = {"gpt-base": "GPT, 12 blocks, 8 x 1024 tokens, d = 768, on a GPU"}


def titles_of(rows):
    return {model: title for model, title in {**TITLES, **TITLES_ON_GPU}.items() if any(row["model"] == model for row in rows)}


def measure(build, pairs):
    environment = dict(os.environ, OMP_WAIT_POLICY="passive", OMP_PROC_BIND="true", OMP_PLACES="cores")
    rows = []
    for model in TITLES:
        for command in ([str(pathlib.Path(build) / "benchmarks/budget_sweep")],
                        [str(ROOT.parent / "build/venv/bin/python"), str(ROOT / "peers/budget_sweep.py")]):
            text = subprocess.run(command + [model, str(pairs)], env=environment, check=True, text=True, stdout=subprocess.PIPE).stdout
            lines = [line for line in text.splitlines() if line.startswith(model + ",")]
            rows += [dict(zip(FIELDS, fields)) for fields in csv.reader(lines)]
            print("\n".join(lines), file=sys.stderr, flush=True)
    return rows


def markdown(rows):
    text, off = "", []
    for model, title in titles_of(rows).items():
        own = [row for row in rows if row["model"] == model]
        plain = {row["language"]: int(row["peak_bytes"]) for row in own if row["method"] == "keep everything"}
        text += f"{title}:\n\n| way | activation peak, bytes | of all | time, keeping everything = 1 | lowest to highest |\n|---|---|---|---|---|\n"
        for row in own:
            peak, predicted = int(row["peak_bytes"]), re.match(r"predicted (\d+) bytes; (.*)", row["setting"])
            way = f"{'snug' if row['language'] == 'C++' else 'Python'}: {row['method']} {row['setting']}".strip()
            if predicted:
                off.append(abs(peak - int(predicted[1])))
                way = f"snug: automatic, predicted time {predicted[2]}"
            text += (f"| {way} | {peak:,} | {peak / plain[row['language']]:.1%} | {float(row['time']):.3f} | "
                     f"{float(row['lowest']):.3f} to {float(row['highest']):.3f} |\n")
        text += "\n"
    differ = f"differ by at most {max(off)} bytes" if max(off, default=0) > 0 else "are equal"
    return text + f"Measured and predicted peaks of the {len(off)} plans {differ}.\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", default=str(ROOT / "results"))
    parser.add_argument("--from", dest="source", help="draw what was measured before")
    arguments = parser.parse_args()
    if arguments.source:
        with open(arguments.source) as file:
            rows = list(csv.DictReader(file))
    else:
        rows = measure(arguments.build, arguments.pairs)
    out = pathlib.Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "budget_sweep.csv", "w") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    for model, title in titles_of(rows).items():
        with open(out / f"budget_sweep_{model}.svg", "w") as file:
            subprocess.run([str(pathlib.Path(arguments.build) / "benchmarks/budget_sweep_figure"), str(out / "budget_sweep.csv"), model, title],
                           check=True, stdout=file)
    print(markdown(rows))


if __name__ == "__main__":
    sys.exit(main())
