"""The site of README.md, docs/ and the headers has no dead link, no public name without a contract and no contract without an end; and the rules can fail.

usage: site_test.py ROOT
"""

import pathlib
import shutil
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop(1)).resolve()
sys.path.insert(0, str(ROOT / "tools/site"))
if shutil.which("doxygen") is None:
    print("site_test: skipped, there is no doxygen")
    sys.exit(77)
try:
    import breathe  # noqa: F401
    import furo  # noqa: F401
    import myst_parser  # noqa: F401
except ImportError as error:
    print(f"site_test: skipped, {error}")
    sys.exit(77)

import api  # noqa: E402
import links  # noqa: E402
import make_site  # noqa: E402


class Site(unittest.TestCase):
    def test_is_whole(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder)
            self.assertEqual(make_site.make(ROOT, out), [])
            stepper = (out / "html/api/step.html").read_text()
            for shown in ("split_batch_norm", "plan_for", "makes one training step in the right order"):
                self.assertIn(shown, stepper)
            self.assertNotIn("make_or_repeat", stepper)
            self.assertIn("plan_for", (out / "html/searchindex.js").read_text())

    def test_loads_nothing_from_elsewhere(self):
        pages = ('<link href="https://x/a.css">', '<script src="//x/a.js"></script>', '<img src="http://x/a.png">')
        for page in pages:
            with tempfile.TemporaryDirectory() as folder:
                (pathlib.Path(folder) / "a.html").write_text(page)
                self.assertEqual(len(list(links.loads_from_elsewhere(pathlib.Path(folder)))), 1, page)


class DeadLinks(unittest.TestCase):
    def of(self, **pages):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in pages.items():
                (pathlib.Path(folder) / f"{name}.html").write_text(text)
            return list(links.dead_links(pathlib.Path(folder)))

    def test_are_found(self):
        self.assertEqual(self.of(a='<a href="b.html">'), ["a.html: b.html"])
        self.assertEqual(self.of(a='<a href="b.html#x">', b='<p id="y">'), ["a.html: b.html#x"])
        self.assertEqual(self.of(a='<img src="a.svg">'), ["a.html: a.svg"])

    def test_are_not_found_where_there_are_none(self):
        self.assertEqual(self.of(a='<a href="b.html#x"><a href="#"><a href="https://x/">', b='<p id="x">'), [])


class Contracts(unittest.TestCase):
    # The comment that opens a header, what is in it, and the name that lacks a contract.
    HEADERS = [
        ("", "class A1 {};", "class snug::A1"),
        ("", "int f2();", "function snug::f2"),
        ("", "enum class E3 { x };", "enum snug::E3"),
        ("", "using T4 = int;", "typedef snug::T4"),
        ("", "/// Words.\nclass A5 {\n public:\n  int g();\n};", "function snug::A5::g"),
        ("", "/// Words.\nint f6();\n\nint g6();", "function snug::g6"),
        ("", "/// Words.\nint f7();\nint g7();", None),
        ("// A8: words.\n", "class A8 {};\nstruct A8Options {};", None),
        ("// f9: words.\n", "int f9();", None),
        ("", "enum class E10 { x  ///< words\n};", None),
        ("", "/// Words.\nclass A11 {\n public:\n  A11(A11&&);\n  ~A11();\n};", None),
    ]

    def test_are_comments_beside_a_name_above_its_group_or_at_the_top(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve()
            (root / "include/snug").mkdir(parents=True)
            (root / "bindings/c/snug").mkdir(parents=True)
            for number, (head, body, _) in enumerate(self.HEADERS):
                (root / f"include/snug/h{number}.h").write_text(f"#pragma once\n{head}namespace snug {{\n\n{body}\n\n}}\n")
            missing = [name.split(": ")[1] for name in api.undocumented(root, api.run_doxygen(root, root / "out"))]
            self.assertEqual(sorted(missing), sorted(name for *_, name in self.HEADERS if name))

    # A header's text, and the end that is no sentence.
    ENDS = [
        ("/// Throws Error\nint f();", "3: Throws Error"),
        ("class A {\n  /// Words.\n  /// Throws\n  int f();\n};", "5: Throws"),
        ("/// Words.\nint f();  ///< words", None),
        ("/// One of:\nint f();", None),
        ("/// Words:\n///\n///   f();\nint f();", None),
    ]

    def test_end_with_a_sentence_or_code(self):
        def ends(core, c="/* Words. */\n"):
            with tempfile.TemporaryDirectory() as folder:
                root = pathlib.Path(folder).resolve()
                for name, text in (("include/snug/h.h", core), ("bindings/c/snug/c.h", c)):
                    (root / name).parent.mkdir(parents=True)
                    (root / name).write_text(text)
                return list(api.unfinished(root))

        for body, end in self.ENDS:
            self.assertEqual(ends(f"#pragma once\n\n{body}\n"), [f"include/snug/h.h:{end}"] if end else [], body)
        self.assertEqual(ends("#pragma once\n// A header of\n\n"), ["include/snug/h.h:2: A header of"])
        self.assertEqual(ends("#pragma once\n// A header:\n//   f();\n\n"), [])
        self.assertEqual(ends("#pragma once\n", "/* --- errors */\n\n/* Words\n * and */\nint f(void);\n"), ["bindings/c/snug/c.h:4: and"])


if __name__ == "__main__":
    unittest.main()
