"""`snug formats` as its users meet it; what it says of FP16 and FP32 is compared with Python's own packing of floats.

usage: formats_test.py PATH-OF-SNUG [unittest arguments]
"""

import math
import os
import pathlib
import random
import struct
import subprocess
import sys
import unittest

SNUG = pathlib.Path(sys.argv.pop(1)).resolve() if len(sys.argv) > 1 else None
GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "golden"
FORMATS = ["FP32", "TF32", "BF16", "FP16", "FP8 E4M3", "FP8 E5M2"]


class FormatsTest(unittest.TestCase):
    def snug(self, *arguments):
        return subprocess.run([SNUG, "formats", *arguments], capture_output=True, text=True, timeout=60,
                              env={**os.environ, "OMP_WAIT_POLICY": "passive", "COLUMNS": "120"})

    def rows(self, *arguments):
        """The lines on a number by format: sign, exponent and fraction bits, value, error, relative error, verdict."""
        done = self.snug(*arguments)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        lines = done.stdout.splitlines()[-6:]
        self.assertEqual([line[:8].strip() for line in lines], FORMATS)
        return {line[:8].strip(): line[8:].replace("|", " ").split() for line in lines}

    def is_as_recorded(self, shown, name):
        golden = GOLDEN / name
        if os.environ.get("SNUG_UPDATE_GOLDEN"):
            golden.write_text(shown)
        self.assertEqual(shown, golden.read_text())


class Tables(FormatsTest):
    def test_and_help_are_as_recorded_and_fit_a_screen(self):
        for name, arguments in (("help_formats.txt", ["--help"]), ("formats.txt", []), ("formats_number.txt", ["0.00006666666"])):
            with self.subTest(name):
                shown = self.snug(*arguments).stdout
                self.is_as_recorded(shown, name)
                self.assertLessEqual(len(shown.splitlines()), 40)

    def test_are_at_most_100_columns_wide(self):
        for arguments in ([], ["-1.23456789e-300"], ["-3.1415926535897931e38"], ["0x1.fffffffffffffp1023"], ["nan"]):
            for line in self.snug(*arguments).stdout.splitlines():
                self.assertLessEqual(len(line), 100, line)


class Number(FormatsTest):
    def test_the_example_in_fp16(self):
        sign, exponent, fraction, value, error, relative, verdict = self.rows("0.00006666666")["FP16"]
        self.assertEqual((value, verdict), ("6.6638e-05", "rounding"))
        self.assertEqual((sign, exponent, fraction), ("0", "00001", "0001011110"))
        self.assertEqual((error, relative), ("-2.9e-08", "4.3e-04"))

    def test_is_rounded_as_python_packs_it(self):
        random.seed(1)
        numbers = [random.choice((-1, 1)) * random.uniform(1, 2) * 2.0 ** random.randint(-28, 14) for _ in range(20)]
        for number in [*numbers, 0.0, -0.0, 1.0, 65504.0, math.inf, 2.0**-24, 1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-40]:
            rows = self.rows("--", repr(number))
            for name, pack, as_int, exponent_bits in (("FP16", "<e", "<H", 5), ("FP32", "<f", "<I", 8)):
                packed = struct.pack(pack, number)
                bits = f"{struct.unpack(as_int, packed)[0]:0{8 * len(packed)}b}"
                self.assertEqual(rows[name][:3], [bits[0], bits[1:1 + exponent_bits], bits[1 + exponent_bits:]], number)
                expected = struct.unpack(pack, packed)[0]
                self.assertEqual(struct.pack(pack, float(rows[name][3])), packed)
                self.assertEqual(rows[name][6] == "exact", expected == number)

    def test_says_overflow_underflow_and_rounding(self):
        verdicts = lambda number: [row[6] for row in self.rows(number).values()]
        self.assertEqual(verdicts("70000"), ["exact", "rounding", "rounding", "overflow", "overflow", "overflow"])
        self.assertEqual(verdicts("1e-8"), ["rounding", "rounding", "rounding", "underflow", "underflow", "underflow"])
        self.assertEqual(verdicts("1e-6")[3], "subnormal")
        self.assertEqual(verdicts("nan"), ["nan"] * 6)
        self.assertEqual(verdicts("inf"), ["exact"] * 4 + ["overflow", "exact"])
        self.assertEqual(self.rows("500")["FP8 E4M3"][3:], ["448", "-5.2e+01", "1.0e-01", "overflow"])

    def test_is_written_in_many_ways(self):
        for written, value in ((["-1.5"], "-1.5"), (["--", "-1.5"], "-1.5"), (["-.5"], "-0.5"), (["+2"], "2"), (["2e0"], "2"),
                               (["-2E+0"], "-2"), (["0x1.8p-1"], "0.75"), (["-0X1p1"], "-2"), (["--", "-inf"], "-inf"),
                               (["-inf"], "-inf"), (["Infinity"], "inf"), (["NaN"], "nan"), (["-nan"], "nan"), (["-0"], "-0")):
            with self.subTest(written):
                self.assertEqual(self.rows(*written)["FP16"][3], value)

    def test_junk_is_refused_in_one_line(self):
        for junk in ("", "abc", "1.5x", "1,5", "0x", "0xinf", "0x-1", "--5", "+-5", "-", "1e", "1 ", "--hlp", "-x", "1e999", "-1e-400"):
            with self.subTest(junk):
                for arguments in ([junk], ["--", junk]):
                    done = self.snug(*arguments)
                    self.assertEqual((done.returncode, done.stdout), (2, ""))
                    self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
                    self.assertIn(f"'{junk}'", done.stderr)
        for two in (["1", "2"], ["-1", "-2"], ["1", "2", "3"], ["1", "--", "-2"], ["-inf", "-nan"]):
            done = self.snug(*two)
            self.assertEqual((done.returncode, len(done.stderr.splitlines())), (2, 1), done.stderr)


if __name__ == "__main__":
    if SNUG is None:
        sys.exit(__doc__)
    unittest.main()
