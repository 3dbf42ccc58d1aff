"""Runs benchmarks/budget_sweep.cpp and its Python peer, and writes the numbers as CSV and the figure as SVG; prints them as Markdown.

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
# Okabe & Ito 2008. (method, language): colour, dashes.
LOOKS = {
    ("automatic", "C++"): ("#d55e00", ""),
    ("every block", "C++"): ("#0072b2", ""),
    ("checkpoint_sequential", "C++"): ("#009e73", "6 4"),
    ("smaller micro-batches", "C++"): ("#e69f00", "2 4"),
    ("every block", "Python"): ("#56b4e9", ""),
    ("save products", "Python"): ("#cc79a7", ""),
    ("torch.compile", "Python"): ("#000000", "2 2"),
}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, LEGEND = 900, 380, 56, 34, 44, 210


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
    for model, title in TITLES.items():
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
    return text + f"Measured and predicted peaks of the {len(off)} plans differ by at most {max(off, default=0)} bytes.\n"


def marker(x, y, colour):
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'


def panel(rows, top):
    """One model: time over the activation peak, both relative to keeping everything in the same language."""
    plain = {row["language"]: int(row["peak_bytes"]) for row in rows if row["method"] == "keep everything"}
    points = [(row, int(row["peak_bytes"]) / plain[row["language"]], float(row["time"])) for row in rows]
    high = max(1.5, min(2.0, max(time for *_, time in points) * 1.02))
    low = min(0.95, min(time for *_, time in points) * 0.98)

    def place(share, time):
        x = LEFT + (WIDTH - LEFT - LEGEND) * (1 - min(share, 1.1) / 1.1)
        return x, top + TOP + (HEIGHT - TOP - BOTTOM) * (high - min(time, high)) / (high - low)

    svg = [f'<text x="{LEFT}" y="{top + 20}" font-weight="bold">{TITLES[rows[0]["model"]]}</text>']
    for tenth in range(0, 11, 2):
        x, y = place(tenth / 10, low)
        svg.append(f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{10 * tenth} %</text>')
    for step in range(19, 41):
        if low <= step / 20 <= high and step % 2 == 0:
            x, y = place(1.1, step / 20)
            svg.append(f'<path d="M{x:.1f} {y:.1f}H{WIDTH - LEGEND}" stroke="#ddd"/>'
                       f'<text x="{x - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{step / 20:.1f}</text>')
    label = top + TOP + 12
    for (method, language), (colour, dashes) in LOOKS.items():
        own = sorted((place(share, time) for row, share, time in points if (row["method"], row["language"]) == (method, language)))
        if not own:
            continue
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in own)
        svg.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dashes}"/>')
        svg += [marker(x, y, colour) for x, y in own]
        name = f"snug: {method}" if language == "C++" else f"Python: {method}"
        svg.append(marker(WIDTH - LEGEND + 14, label - 4, colour) + f'<text x="{WIDTH - LEGEND + 24}" y="{label}">{name}</text>')
        label += 20
    svg.append(f'<text x="{LEFT}" y="{top + HEIGHT - 8}">activation peak, and time of a step (upwards), '
               "against keeping everything in the same language</text>")
    return "\n".join(svg)


def figure(rows):
    models = [model for model in TITLES if any(row["model"] == model for row in rows)]
    panels = [panel([row for row in rows if row["model"] == model], i * HEIGHT) for i, model in enumerate(models)]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT * len(models)}" font-family="sans-serif" '
            'font-size="12">\n<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(panels) + "\n</svg>\n")


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
    (out / "budget_sweep.svg").write_text(figure(rows))
    print(markdown(rows))


if __name__ == "__main__":
    sys.exit(main())
