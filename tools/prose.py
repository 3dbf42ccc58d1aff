#!/usr/bin/env python3
"""Measures how much of a text refers to other words instead of naming things.

Prints the share of pronouns and pronoun-like words among all words, file by file, the highest share first. Words are those of the
comments of .h and .cpp files, and of the text of .md files without code, quoted results and addresses of links. Files with at most 100
words are left out. Sentences with many of these words are hard to read: a reader must solve each one. The measure is an alarm: the cure
is to repeat the noun, and no fact is left out for it.

usage: prose.py [--limit PERCENT] [--by-folder] FILE-OR-FOLDER...

  --limit PERCENT    print only files above the limit; exit status 1 if a file is above
  --by-folder        all files of a folder together, such as a module of src/
"""

import argparse
import pathlib
import re
import sys

PRONOUNS = set("it its that those this these what which one ones they them their such there where".split())
FEWEST_WORDS = 100


def comments(source):
    return " ".join(a or b for a, b in re.findall(r"^\s*(?://[/<]*|\*)\s?(.*)$|//[/<]*\s(.*)$", source, re.MULTILINE))


def prose(page):
    page = re.sub(r"<!--from .*?<!--/from-->|```.*?```", " ", page, flags=re.DOTALL)
    page = re.sub(r"(?m)^    .*$|<!--.*?-->|\]\([^)]*\)|`[^`\n]*`", " ", page)
    return page


TEXT_OF = {".h": comments, ".cpp": comments, ".md": prose}


def share(paths):
    """(percent of the words, number of words)"""
    words = re.findall(r"[A-Za-z']+", " ".join(TEXT_OF[path.suffix](path.read_text()) for path in paths).lower())
    return 100 * sum(word in PRONOUNS for word in words) / max(len(words), 1), len(words)


def files_of(paths):
    for path in map(pathlib.Path, paths):
        yield from sorted(file for file in path.rglob("*") if file.suffix in TEXT_OF) if path.is_dir() else [path]


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--limit", type=float, metavar="PERCENT")
    arguments.add_argument("--by-folder", action="store_true")
    arguments.add_argument("paths", nargs="+", metavar="FILE-OR-FOLDER")
    given = arguments.parse_args()
    groups = {}
    for file in files_of(given.paths):
        groups.setdefault(file.parent if given.by_folder else file, []).append(file)
    rows = [(*share(files), name) for name, files in groups.items()]
    rows = sorted((row for row in rows if row[1] > FEWEST_WORDS and (given.limit is None or row[0] > given.limit)), key=lambda row: -row[0])
    for percent, count, file in rows:
        print(f"{percent:5.1f} %  {count:5d} words  {file}")
    return 1 if given.limit is not None and rows else 0


if __name__ == "__main__":
    sys.exit(main())
