"""The figures of docs/ are plain SVG, which every viewer of images shows.

usage: figures_test.py REPOSITORY [unittest arguments]
"""

import pathlib
import sys
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(sys.argv.pop(1))
SVG = "{http://www.w3.org/2000/svg}"
DRAWN = {"svg", "title", "style", "g", "path", "rect", "circle", "text"}


class Figures(unittest.TestCase):
    def test_are_plain_svg_with_a_title_and_a_view_box(self):
        figures = sorted((ROOT / "docs" / "figures").glob("*.svg"))
        self.assertGreater(len(figures), 5)
        for figure in figures:
            with self.subTest(figure.name):
                text = figure.read_text()
                root = xml.etree.ElementTree.fromstring(text)
                self.assertEqual(root.tag, SVG + "svg")
                self.assertLessEqual({element.tag for element in root.iter()}, {SVG + name for name in DRAWN})
                self.assertTrue(root.findtext(SVG + "title"))
                _, _, width, height = map(float, root.attrib["viewBox"].split())
                self.assertGreater(min(width, height), 0)
                for outside in ("var(", "url(", "@import", "href"):
                    self.assertNotIn(outside, text)

    def test_stand_in_a_page(self):
        pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
        for figure in (ROOT / "docs" / "figures").iterdir():
            self.assertIn(f"figures/{figure.name}", pages)


if __name__ == "__main__":
    unittest.main()
