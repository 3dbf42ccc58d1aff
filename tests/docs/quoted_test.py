"""Documents quote the figures of benchmarks/results/figures.json, which are those of the results; and each check can fail.

usage: quoted_test.py ROOT
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1)).resolve()
sys.path.insert(0, str(ROOT / "tools"))

import figures  # noqa: E402

ENTRY = {"name": "a", "program": "p", "date": "2026-01-01", "machine": "m", "source": "benchmarks/results/r.md", "line": "row a", "value": 10.35, "low": 7.79,
         "high": 26.28, "digits": 2, "unit": " x"}
README = "## What it costs\n\n| what | measured | by |\n|---|---|---|\n| speed | <!--=a-->10 x (7.8 to 26)<!--/--> | `p` |\n"


class Quoted(unittest.TestCase):
    def test_in_this_repository(self):
        self.assertEqual(list(figures.problems(ROOT)), [])
        self.assertEqual(list(figures.unmarked((ROOT / "README.md").read_text())), [])


    def test_scaling_page_has_the_tables_of_its_program(self):
        printed = subprocess.run([sys.executable, ROOT / "tools" / "scaling_model.py"], capture_output=True, text=True, check=True).stdout
        rows = [line for line in printed.splitlines() if line.startswith("|")]
        self.assertGreater(len(rows), 20)
        page = (ROOT / "benchmarks" / "results" / "scaling-model.md").read_text().splitlines()
        self.assertEqual([row for row in rows if row not in page], [])


class Checks(unittest.TestCase):
    def problems(self, readme=README, entry=ENTRY, results="| row a | 10.35 | 7.79 to 26.28 |\n"):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "benchmarks/results").mkdir(parents=True)
            (root / "docs").mkdir()
            (root / "README.md").write_text(readme)
            (root / "benchmarks/results/r.md").write_text(results)
            (root / figures.FILE).write_text(json.dumps({"figures": [entry]}))
            found = list(figures.problems(root))
            figures.write(root)
            self.written = (root / "README.md").read_text()
            return found

    def test_pass_where_all_is_right(self):
        self.assertEqual(self.problems(), [])
        self.assertEqual(self.written, README)

    def test_find(self):
        for expected, given in (("README.md: a is '11 x'", {"readme": README.replace("10 x (7.8 to 26)", "11 x")}),
                                ("README.md: b is not in", {"readme": README + "<!--=b-->1<!--/-->"}),
                                ("has no end", {"readme": README + "<!--=a-->1\n"}),
                                ("a is quoted nowhere", {"readme": ""}),
                                ("does not say its machine", {"entry": {**ENTRY, "machine": ""}}),
                                ("no line of", {"results": "| row a | 10.36 | 7.79 to 26.28 |\n"}),
                                ("no line of", {"results": "| row b | 10.35 | 7.79 to 26.28 |\n"}),
                                ("no line of", {"results": "| row a | 110.35 | 7.79 to 26.28 |\n"})):
            found = self.problems(**given)
            self.assertTrue(len(found) == 1 and expected in found[0], (expected, found))

    def test_hold_blocks_to_their_files(self):
        results = "| row a | 10.35 | 7.79 to 26.28 |\n## A table\n\n`made by p`\n\n| x |\n|---|\n| 1 |\n\n## Printed\n\n```\n$ p\n| y |\n```\n"
        table, printed = "| x |\n|---|\n| 1 |\n", "```\n$ p\n| y |\n```\n"
        quoted = lambda words, block: f"{README}<!--from benchmarks/results/r.md: {words}-->\n{block}<!--/from-->\n"  # noqa: E731
        for words, block in (("A table", table), ("Printed", printed)):
            self.assertEqual(self.problems(quoted(words, block), results=results), [])
            found = self.problems(quoted(words, block.replace("|\n", "!|\n")), results=results)
            self.assertTrue(len(found) == 1 and "is another" in found[0], found)
            self.assertEqual(self.written, quoted(words, block))
        for readme, expected in ((quoted("No table", table), "no such block"),
                                 (quoted("A table", table).replace("r.md:", "s.md:"), "no such block"),
                                 (quoted("A table", table).replace("<!--/from-->", ""), "block's comment has no end")):
            found = self.problems(readme, results=results)
            self.assertTrue(len(found) == 1 and expected in found[0], (expected, found))
        open_one = quoted("A table", "| old |\n").replace("<!--/from-->", "prose") + quoted("Printed", printed)
        self.assertEqual(len(self.problems(open_one, results=results)), 1)
        self.assertEqual(self.written, open_one)

    def test_take_no_block_of_another_section(self):
        text = "## A of 64\n\ncrashed\n\n## A\n\n| 1 |\n\n## B\n\n```\n## no heading\n| 2 |\n```\n| 3 |\n"
        for words, block in (("## A", "| 1 |\n"), ("## A of 64", None), ("crashed", None), ("## B", "```\n## no heading\n| 2 |\n```\n"), ("## C", None)):
            self.assertEqual(figures.block_of(text, words), block, words)

    def test_write_what_the_file_has(self):
        self.problems(readme=README.replace("10 x (7.8 to 26)", "old"))
        self.assertEqual(self.written, README)

    def test_take_the_numbers_of_a_later_file(self):
        old, new = "| row a | 3 | 10.35 | 7.79 to 26.28 |\n", "| row a | 3 | 9.9 | 8 to 12.50 |\n"
        now = figures.replaced(figures.json.loads(json.dumps(ENTRY), parse_float=figures.decimal.Decimal), old, new)
        self.assertEqual([f"{now[key]:f}" for key in ("value", "low", "high")], ["9.9", "8", "12.50"])
        self.assertIsNone(figures.replaced(now, old, new))
        self.assertIsNone(figures.replaced(ENTRY, old, new.replace("row a", "row b")))
        twice = {**now, "value": now["low"]}
        self.assertIsNone(figures.replaced(twice, "| row a | 8 | 8 to 12.50 |\n", "| row a | 9 | 7 to 12 |\n"))

    def test_replace_a_source(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "benchmarks/results").mkdir(parents=True)
            (root / "benchmarks/results/r.md").write_text("| row a | 10.35 | 7.79 to 26.28 |\n| row c | -0.5 |\n")
            (root / "benchmarks/results/s.md").write_text("| row a | 11.35 | 8.79 to 27.28 |\n")
            other = {"name": "c", "program": "p", "date": "d", "machine": "m", "source": "benchmarks/results/r.md", "line": "row c", "value": -0.5}
            (root / figures.FILE).write_text(json.dumps({"figures": [ENTRY, other]}))
            self.assertEqual(list(figures.replace(root, "benchmarks/results/r.md", "benchmarks/results/s.md", "2026-02-02")), ["c"])
            a, c = json.loads((root / figures.FILE).read_text())["figures"]
            self.assertEqual((a["value"], a["low"], a["high"], a["source"], a["date"]), (11.35, 8.79, 27.28, "benchmarks/results/s.md", "2026-02-02"))
            self.assertEqual(c, other)

    def test_find_a_figure_of_the_readme_that_has_no_mark(self):
        self.assertEqual(list(figures.unmarked(README.replace("| `p`", "and 1.25 | `p`"))), ["1.25"])

    def test_round_halves_up_to_significant_digits(self):
        from decimal import Decimal
        for number, digits, text in (("6.55", 2, "6.6"), ("15.95", 2, "16"), ("0.0125", 2, "0.013"), ("1250", 2, "1300"), ("0.790", None, "0.790")):
            self.assertEqual(figures.rounded(Decimal(number), digits), text)


if __name__ == "__main__":
    unittest.main()
