"""`snug compare` as its users meet it: the page, the numbers beside it, and what it refuses.

usage: compare_test.py PATH-OF-SNUG [unittest arguments]
"""

import collections
import csv
import html
import io
import math
import os
import random
import re
import struct
import xml.etree.ElementTree

from program import GOLDEN, SnugTest, main

SMALL = ["--quick", "--points", "200", "--epochs", "3", "--pairs", "1"]


def places(path):
    """The points of an SVG path of M and L."""
    return [(float(x), float(y)) for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path)]


def is_affine(values, drawn, tolerance):
    """Whether drawn = a * values + b, up to the rounding of the page."""
    low, high = min(range(len(values)), key=values.__getitem__), max(range(len(values)), key=values.__getitem__)
    if values[low] == values[high]:
        return len(set(drawn)) == 1
    slope = (drawn[high] - drawn[low]) / (values[high] - values[low])
    return all(abs(drawn[low] + slope * (v - values[low]) - d) <= tolerance for v, d in zip(values, drawn))


def is_on_axis(values, drawn):
    logarithms = [math.log(v) for v in values] if min(values) > 0 else values
    return is_affine(values, drawn, 0.2) or is_affine(logarithms, drawn, 0.2)


def halves_again(begin, end):
    """How often blocks run again when a checkpointed region of halves in halves goes backward: the first half for the second one's input, and
    each half for itself."""
    if end - begin == 1:
        return collections.Counter([begin])
    middle = (begin + end) // 2
    return collections.Counter(range(begin, middle)) + halves_again(begin, middle) + halves_again(middle, end)


class Compare(SnugTest):
    def test_help_is_as_recorded_and_fits_a_screen(self):
        shown = self.snug("compare", "--help").stdout
        golden = GOLDEN / "help_compare.txt"
        if os.environ.get("SNUG_UPDATE_GOLDEN"):
            golden.write_text(shown)
        self.assertEqual(shown, golden.read_text())
        self.assertLessEqual(len(shown.splitlines()), 40)

    def compare(self, *arguments):
        out = self.folder / "page"
        done = self.snug("compare", *arguments, "--out", out)
        self.assertEqual(done.returncode, 0, done.stderr)
        return out, (out / "index.html").read_text(), done.stdout

    def figures(self, out, page):
        """(file, HTML, rows of the CSV without the device's name) of each figure."""
        result = []
        for figure in re.findall(r"<figure.*?</figure>", page, re.DOTALL):
            file = re.search(r'href="([^"]+)\.csv"', figure)[1]
            rows = list(csv.reader(io.StringIO((out / f"{file}.csv").read_text())))
            self.assertEqual([row[-1] for row in rows], ["device"] + ["cpu"] * (len(rows) - 1), file)
            result.append((file, figure, [row[:-1] for row in rows]))
        return result

    def rows(self, out, file):
        return list(csv.DictReader(io.StringIO((out / f"{file}.csv").read_text())))

    def check_plot(self, file, figure, rows):
        curves = {}
        for name, x, y, _ in rows[1:]:
            curves.setdefault(name, []).append((float(x), float(y)))
        for i, (name, points) in enumerate(curves.items()):
            path = re.search(rf'<path class="(?:dots|line) series-{i % 8}[^"]*" d="([^"]*)"', figure)
            drawn = places(path[1])
            self.assertEqual(len(drawn), len(points), (file, name))
            self.assertTrue(is_on_axis([x for x, _ in points], [x for x, _ in drawn]), (file, name, "x"))
            self.assertTrue(is_on_axis([y for _, y in points], [y for _, y in drawn]), (file, name, "y"))

    def check_bars(self, file, figure, rows):
        values = [float(value) for row in rows[1:] for value in row[1:-1]]
        drawn = [float(width) for width in re.findall(r'<rect class="area [^>]*width="([\d.]+)"', figure)]
        self.assertEqual(len(drawn), len(values), file)
        scale = max(drawn) / max(values)
        for value, width in zip(values, drawn):
            self.assertAlmostEqual(value * scale, width, delta=0.02, msg=file)

    def check_table(self, file, figure, rows):
        cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", figure)
        self.assertEqual([html.unescape(cell) for cell in cells], [cell for row in rows for cell in row], file)

    def check_schedule(self, file, figure, rows):
        panels = figure.split('class="name"')[1:]
        ways = list(dict.fromkeys(row[0] for row in rows[1:]))
        self.assertEqual(len(panels), len(ways), file)
        for way, panel in zip(ways, panels):
            panel = panel.split('translate(66')[0]  # without the legend
            runs = [row for row in rows[1:] if row[0] == way]
            for run, look in (("forward", "first"), ("again", "again"), ("backward", "back")):
                self.assertEqual(panel.count(f'class="{look}"'), sum(row[2] == run for row in runs), (way, run))
            bands = [float(width) for width in re.findall(r'width="([\d.]+)" [^>]*class="band"', panel)]
            lengths = [int(row[4]) - int(row[1]) for row in runs if row[4]]
            self.assertTrue(is_affine(lengths, bands, 0.1), way)

    def check_page(self, out, page):
        for outside in ("http://", "https://", "src=", "@import", "url("):
            self.assertNotIn(outside, page)
        figures = self.figures(out, page)
        self.assertEqual(sorted(file for file, _, _ in figures), sorted(p.stem for p in out.glob("*.csv")))
        for file, figure, rows in figures:
            self.assertRegex(figure, r'<p class="made">[^<]{10,}', file)
            check = (self.check_schedule if 'class="schedule"' in figure else
                     self.check_bars if 'class="bars"' in figure else
                     self.check_table if 'class="numbers"' in figure else self.check_plot)
            check(file, figure, rows)
            if check != self.check_table:
                self.check_image(check, (out / f"{file}.svg").read_text(), file, rows)

    def check_image(self, check, image, file, rows):
        """The image beside the page is plain SVG, and draws what the page does."""
        tags = {shape.tag.removeprefix("{http://www.w3.org/2000/svg}") for shape in xml.etree.ElementTree.fromstring(image).iter()}
        self.assertLessEqual(tags, {"svg", "title", "style", "g", "path", "rect", "circle", "text"}, file)
        check(file, image, rows)

    def test_sin_cos_prints_the_five_lines_and_draws_its_numbers(self):
        out, page, printed = self.compare("sin-cos", *SMALL)
        for line in ("FP32 training time: ", "Mixed precision training time: ", "Time saved: ", "Reduction: ", "Speedup: "):
            self.assertIn(f"\n{line}", printed)
        self.assertIn("200 points", printed)
        self.check_page(out, page)
        losses = self.rows(out, "sin-cos-loss")
        self.assertEqual([row["epoch"] for row in losses if row["curve"] == "FP32"], ["1", "2", "3"])
        self.assertIn("Time to train", (out / "results.md").read_text())

    def test_precision_counts_bytes(self):
        out, page, _ = self.compare("precision", "--quick", "--device", "cpu")
        self.check_page(out, page)
        for text in (page, (out / "results.md").read_text()):
            self.assertIn(", device cpu", text)
        dynamic = {}
        for row in self.rows(out, "precision-dynamic"):
            dynamic.setdefault(row["curve"], []).append(float(row["dynamic bytes"]))
        for full, low in zip(dynamic["FP32"][2:], dynamic["autocast to BF16"][2:]):
            self.assertLess(low, full)

    def test_checkpointing_changes_no_bit_and_plans_keep_to_their_bytes(self):
        out, page, _ = self.compare("checkpointing", "--quick", "--pairs", "1")
        self.check_page(out, page)
        for model in ("gpt", "mlp", "resnet"):
            rows = self.rows(out, f"checkpointing-{model}-table")
            self.assertGreater(len(rows), 8)
            for row in rows:
                expected = "another network" if row["way"].startswith("reversible") else "same bits"
                self.assertEqual(row["gradients"], expected, row)
            peaks = {row["label"]: float(row["activation peak"]) for row in self.rows(out, f"checkpointing-{model}")}
            names = {"offload": "to a file", "selective": "keeps matrix products"}
            self.assertIn("as offload, with a file", peaks)
            for label, peak in peaks.items():
                by_hand = label.removeprefix("as ").removesuffix(", with a file")
                self.assertLessEqual(peak, peaks.get(names.get(by_hand, by_hand), peak), label)
            by_hand = [peak for label, peak in peaks.items() if "file" not in label]  # which depends on how fast that is
            self.assertEqual(min(by_hand), peaks["least"], model)
        self.check_recorded(self.rows(out, "checkpointing-schedule"))
        fresh, shown = ((folder / name).read_text() for folder, name in (
            (out, "checkpointing-schedule.svg"), (GOLDEN.parent.parent / "docs" / "figures", "schedule.svg")))
        self.assertIn("<svg xmlns=", fresh)
        panels = [picture.split('class="name"')[:4] for picture in (fresh, shown)]  # but the plan's, which depends on times
        self.assertEqual(*panels, "renew docs/figures/schedule.svg, see docs/program.md")

    def check_recorded(self, rows):
        """The recorded runs of 12 blocks are those that each way has in theory."""
        again, kept = {}, {}
        for way in dict.fromkeys(row["way"] for row in rows):
            runs = [row for row in rows if row["way"] == way]
            self.assertEqual([int(run["time"]) for run in runs], list(range(len(runs))))
            order = {kind: [int(run["block"]) for run in runs if run["run"] == kind] for kind in ("forward", "backward")}
            self.assertEqual(order, {"forward": list(range(1, 13)), "backward": list(range(12, 0, -1))}, way)
            again[way] = collections.Counter(int(run["block"]) for run in runs if run["run"] == "again")
            kept[way] = [int(run["block"]) for run in runs if run["kept by forward"] == "1"]
            # What a block works on is there, too, when it goes backward.
            for run in runs:
                if run["run"] == "backward" and run["block"] != "1":
                    self.assertTrue(any(int(made["block"]) == int(run["block"]) - 1 and made["kept until"] and
                                        int(made["time"]) < int(run["time"]) < int(made["kept until"]) for made in runs), run)
        plain, segments, nested, automatic = again
        self.assertEqual(again[plain], {})
        self.assertEqual(kept[plain], list(range(1, 13)))
        self.assertEqual(again[segments], {block: 1 for block in range(1, 9)})  # three segments, of which the last runs plain
        self.assertEqual(kept[segments], [4, 8, 9, 10, 11, 12])
        self.assertEqual(again[nested], halves_again(1, 7) + halves_again(7, 13))
        self.assertEqual(kept[nested], [6, 12])
        self.assertLess(sum(again[automatic].values()), sum(again[nested].values()))
        self.assertLess(len(kept[automatic]), 12)

    def test_accumulation_trains_on_ranks_as_on_one_where_batch_norm_is_synchronised(self):
        digits = self.folder / "digits"
        digits.mkdir()
        noise = random.Random(1)
        (digits / "images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, 600, 28, 28) + noise.randbytes(600 * 784))
        (digits / "labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, 600) + bytes(i % 10 for i in range(600)))
        out, page, _ = self.compare("accumulation", "--quick", "--pairs", "1", "--digits", digits)
        self.check_page(out, page)
        loss = {row["normalisation and split"]: float(row["last training loss"])
                for row in self.rows(out, "accumulation-batch-norm")}
        whole = loss["BatchNorm, 1 x 512"]
        for ranks in ("2 ranks x 256", "4 ranks x 128"):
            synchronised, own = (abs(loss[f"{norm}, {ranks}"] / whole - 1) for norm in ("synchronised BatchNorm", "BatchNorm"))
            self.assertLess(synchronised, 1e-3, ranks)
            self.assertGreater(own, 10 * synchronised, ranks)

    def test_data_parallel_sends_a_kth_if_the_last_micro_batch_alone_communicates(self):
        out, page, _ = self.compare("data-parallel", "--quick", "--pairs", "1")
        self.check_page(out, page)
        sent = {(row["curve"], float(row["micro-batches in a step"])): float(row["sent by a rank in a step"])
                for row in self.rows(out, "data-parallel-bytes")}
        self.assertEqual(len(sent), 16)
        for (curve, k), bytes_sent in sent.items():
            if curve.endswith("after each"):
                self.assertEqual(bytes_sent, k * sent[curve.replace("after each", "after the last"), k])

    def test_fit_trains_more_in_the_same_bytes(self):
        out, page, _ = self.compare("fit", "--quick")
        self.check_page(out, page)
        parameters = [float(row["number of parameters"]) for row in self.rows(out, "fit-parameters")]
        self.assertGreaterEqual(len(set(parameters)), 4)  # nearly each technique makes room for a larger one
        self.assertEqual(parameters, sorted(parameters))
        self.assertGreater(parameters[-1], 2 * parameters[0])
        limit = 200 * 2**20
        for row in self.rows(out, "fit-memory"):
            held = sum(float(value) for name, value in row.items() if name not in ("bar", "note", "device"))
            self.assertLessEqual(held, limit, row)
        sequence = self.rows(out, "fit-sequence")
        self.assertEqual(len(sequence), 3)
        for row in sequence:
            self.assertEqual(row["in the limit"], "trains" if row["way"] == "automatic plan" else "runs out of memory", row)
            self.assertEqual(row["gradients against plain"], "equal to the bit" if row["way"] == "automatic plan" else "", row)

    def test_python_draws_what_was_measured(self):
        results = self.folder / "results.md"
        results.write_text("| ratio of times | median | lowest to highest | target |\n|---|---|---|---|\n"
                           "| A step: Python / snug | 1.50 | 1.20 to 1.70 | at least 1.1 |\n| Another | 0.90 | 0.80 to 1.00 | at least 1 |\n"
                           "| No target | 2.00 | 1.00 to 3.00 |  |\n| Cost | 1.02 | 1.00 to 1.10 | at most 1.04 |\n"
                           "| Microseconds | 1.20 | 0.90 to 1.30 | at most 1 |\n| Nothing | -0.01 | -0.20 to 0.10 | at most 1 |\n")
        out, page, printed = self.compare("python", "--results", results)
        self.check_page(out, page)
        self.assertIn("3 of 5 targets are met", printed)
        self.assertEqual({row["ratio of times, unless another unit is named"]: row["met"] for row in self.rows(out, "python-table")},
                         {"A step: Python / snug": "yes", "Another": "no", "No target": "", "Cost": "yes", "Microseconds": "no", "Nothing": "yes"})
        self.assertEqual([row["bar"] for row in self.rows(out, "python-ratios")], ["A step: Python / snug", "Another"])

    def test_refuses_what_it_cannot_do(self):
        out = self.folder / "new"
        for status, arguments, says in ((2, ["sin-cosine"], ["sin-cosine", "sin-cos"]), (2, ["python"], ["--results"]),
                                        (2, ["sin-cos", "--pairs", "-1"], ["--pairs", "-1"]),
                                        (2, ["sin-cos", "--points", "7"], ["--points"]),
                                        (2, ["sin-cos", "--device", "abacus"], ["compare: ", "'abacus'", "(cpu"]),
                                        (2, ["sin-cos", "--device", "cuda:99"], ["cuda:99"]), (2, ["--quik"], ["--quik", "--quick"])):
            self.refuses(status, "compare", *arguments, "--out", out, says=says)
            self.assertFalse(out.exists())


if __name__ == "__main__":
    main(__doc__)
